"""serve-check's parts: the diagnosis names what was planted, servers are started and stopped whole."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import torch
from runs import write_config
from test_drafter import drafter_for, shape

from draftsmith import configfile, evaluate, serve_check, verify
from draftsmith import tokenize as tokenize_stage
from draftsmith.cli import main
from draftsmith.core import UserError
from draftsmith.decode.methods import prompt_of
from draftsmith.decode.replay import replay
from draftsmith.drafter.model import ContextCache
from draftsmith.serving import compare, mismatches
from draftsmith.serving.client import Answer, connect
from draftsmith.serving.launch import first_cause, running
from draftsmith.target.load import load_tokenizer
from draftsmith.tokenize.work import ROW_STRIDE
from tiny_models import assets, random_ids

STATES = {
    layer: torch.randn(400, 64, generator=torch.Generator().manual_seed(layer + 9))
    for layer in range(-1, 7)
}


def written_with(mismatch, seed: int, num_prompt=12, num_tokens=80) -> mismatches.Text:
    """A text that the drafter, run with this mistake, half guesses: its own drafts, cut at random."""
    taps = mismatch.drafter.shape.taps
    states = {
        layer: table[seed * 97 % 250 :][: num_prompt + num_tokens]
        for layer, table in STATES.items()
    }
    features = torch.stack([states[tap + mismatch.shift] for tap in taps], dim=1)
    features = torch.zeros_like(features) if mismatch.zero else features
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(num_prompt + 1, seed)
    cache = ContextCache(mismatch.drafter)
    cache.append(features[:num_prompt])
    while len(ids) < num_prompt + num_tokens:
        take = int(torch.randint(0, 4, (), generator=generator))
        drafts = mismatch.drafter.draft(ids[-1], cache)[:take]
        at = len(ids) - 1
        ids += [*drafts, int(torch.randint(6, 100, (), generator=generator))]
        cache.append(features[at : len(ids) - 1])
    ids = ids[: num_prompt + num_tokens]
    rounds = len(replay(mismatch.drafter, ids, num_prompt, features).emitted)
    return mismatches.Text(ids, num_prompt, rounds, states)


def test_each_known_mismatch_is_named():
    drafter = drafter_for(shape(("full_attention",), block=5, taps=(1, 3, 5)))
    known = mismatches.known(drafter, suspects=[0, 7])
    assert len({m.name for m in known}) == len(known) > 12
    for planted in known:
        texts = [written_with(planted, seed, num_tokens=24) for seed in range(2)]
        fits = mismatches.explain(known, texts)
        named = mismatches.verdict(fits)
        assert fits[0]["name"] == planted.name and fits[0]["distance"] == 0
        assert fits[1]["distance"] > 0, "two that cannot be told apart"
        if planted.name == mismatches.AS_TRAINED:
            assert named is None
        else:
            assert named is not None and named["name"] == planted.name and named["advice"]


def test_nothing_is_named_when_nothing_fits():
    drafter = drafter_for(shape(("full_attention",) * 2, taps=(1, 3)))
    known = mismatches.known(drafter, suspects=[])
    text = written_with(known[0], 3)
    far = mismatches.Text(text.ids, text.num_prompt, 3 * text.rounds, text.states)
    assert mismatches.verdict(mismatches.explain(known, [far])) is None


def test_partial_rope_is_what_a_server_would_compute():
    """Against a plain implementation: turn the first dims of each head, pair i with i + turned/2."""
    drafter = drafter_for(shape(("full_attention",) * 2))
    other = mismatches.partial_rope(drafter, 0.5)
    d, turned = drafter.shape.head_dim, drafter.shape.head_dim // 2
    x, positions = torch.randn(1, 6, 64), torch.arange(3, 9)[None]
    attention, its = drafter.layers[0].self_attn, other.layers[0].self_attn

    def plain(proj, norm):
        heads = norm(proj(x).unflatten(-1, (-1, d))).transpose(1, 2)
        inverse = drafter.shape.rope_theta ** -(torch.arange(0, turned, 2) / turned)
        angle = (positions[0, :, None] * inverse).repeat(1, 2)
        part, rest = heads[..., :turned], heads[..., turned:]
        swapped = torch.cat([-part[..., turned // 2 :], part[..., : turned // 2]], -1)
        return torch.cat([part * angle.cos() + swapped * angle.sin(), rest], -1)

    q, k = plain(attention.q_proj, attention.q_norm), plain(attention.k_proj, attention.k_norm)
    want = q[:, ::2] @ k.transpose(-1, -2)  # 2 query heads a KV head: compare one of each pair
    from draftsmith.drafter.model import rotate

    rope = other.rope(positions, torch.float32)
    mine = rotate(its.q_norm(its.q_proj(x).unflatten(-1, (-1, d))).transpose(1, 2), *rope)
    keys, _ = its.keys_values(x, rope)
    torch.testing.assert_close(mine[:, ::2] @ keys.transpose(-1, -2), want, rtol=0, atol=1e-4)


SERVER = """
import json, sys, subprocess, time, os
from http.server import BaseHTTPRequestHandler, HTTPServer
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/health": "", "/version": json.dumps({"version": "9"}),
                 "/v1/models": json.dumps({"data": [{"id": "m"}]})}
        self.send_response(200 if self.path in known else 404); self.end_headers()
        self.wfile.write(known.get(self.path, "").encode())
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_is_stopped_with_all_its_processes(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    log = tmp_path / "log"
    with running(f"{sys.executable} {script}", ["--x"], log, wait_s=30) as url:
        assert connect(url).name == "vLLM 9"
        child = int(log.read_text().split("child ")[1].split()[0])
        os.kill(child, 0)
    with pytest.raises(httpx.HTTPError):
        httpx.get(url + "/health")
    deadline = time.time() + 5
    while time.time() < deadline and alive(child):
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("raise ValueError('no such layer')", "ValueError: no such layer"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", f"code -{signal.SIGKILL:d}"),
        (
            "print('ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate'); "
            "raise RuntimeError('Engine core initialization failed. See root cause above.')",
            "CUDA out of memory",
        ),
    ],
)
def test_a_server_that_does_not_come_up_is_explained(tmp_path, body, named):
    command = f'{sys.executable} -c "{body}"'
    with pytest.raises(UserError) as error, running(command, [], tmp_path / "log", wait_s=30):
        raise AssertionError("it came up")
    assert named in str(error.value) and "log" in str(error.value)


def test_a_server_that_dies_when_asked_is_explained_by_its_log(tmp_path):
    """vLLM answers 500 and points to a stack trace above."""
    real = Path(__file__).parents[1] / "failures" / "vllm-first-request.log"
    script, log = tmp_path / "server.py", tmp_path / "log"
    dies = (
        'self.send_response(500); self.end_headers(); self.wfile.write(b"See stack trace (above)")'
    )
    said = f"print(open({str(real)!r}).read(), flush=True)"
    script.write_text(
        SERVER.replace(
            "    def log_", f"    def do_POST(self):\n        {said}; {dies}\n    def log_"
        )
    )
    with (
        pytest.raises(
            UserError, match="HTTP 500.*its first cause is .*CPU GDN attention requires BF16"
        ),
        running(f"{sys.executable} {script}", [], log, wait_s=30) as url,
    ):
        connect(url).complete([1, 2], 3, [0])


def test_near_ties_are_the_servers_dtypes():
    assert serve_check.near_tie("vllm serve x") == serve_check.near_tie(None) == 0.25
    assert serve_check.near_tie("vllm serve x --dtype float32 --port 1") == 1e-3
    assert serve_check.near_tie("vllm serve x --dtype=float") == 1e-3


def test_a_command_that_is_none_and_a_server_that_is_silent(tmp_path):
    with (
        pytest.raises(UserError, match="no program here"),
        running("no-such-program", [], tmp_path / "a", wait_s=5),
    ):
        pass
    sleeping = f'{sys.executable} -c "import time; time.sleep(60)"'
    with (
        pytest.raises(UserError, match="does not answer after"),
        running(sleeping, [], tmp_path / "b", wait_s=1),
    ):
        pass
    with pytest.raises(UserError, match="vLLM or SGLang"):
        connect("http://127.0.0.1:9")
    assert first_cause(tmp_path / "b").startswith("no error in its log")


def test_served_numbers_are_evaluates_numbers():
    """The same rounds counted by a server and by our loop give the same tau and survival."""
    emitted, accepted = [3, 1, 2], [2, 0, 1]
    traces = [{"emitted": emitted, "accepted": accepted, "tokens": [0] * 7, "decode_s": 1.0}]
    answer = Answer([0] * 7, 1.0, rounds=3, drafted=9, accepted=3, accepted_by_slot=[2, 1, 0])
    served, ours = compare.numbers([answer]), compare.measured(traces, 4)
    for key in ("tau_pooled", "survival", "rounds"):
        assert served[key] == pytest.approx(ours[key])
    runs = {"drafter": served, "evaluate": ours}
    assert compare.judge(runs, shape(block=4))["agrees"]
    assert "block size" in compare.judge(runs, shape(block=8))["fault"]
    slower = compare.numbers([Answer([0] * 7, 1.0, 4, 12, 2, [2, 0, 0])])
    assert not compare.judge({**runs, "drafter": slower}, shape(block=4))["agrees"]


def states_pairs(change=lambda theirs: theirs):
    """Stored states [n, taps 1 and 3] against what a server would give at aux 1..5."""
    generator = torch.Generator().manual_seed(0)
    layers = {i: torch.randn(30, 16, generator=generator) for i in range(8)}
    ours = torch.stack([layers[1], layers[3]], dim=1)
    aux = [1, 2, 3, 4, 5]
    theirs = torch.stack([layers[a - 1] for a in aux], dim=1)
    theirs = theirs * (1 + 0.005 * torch.randn(theirs.shape, generator=generator))
    return [(ours, change(theirs))], [1, 3], aux


def test_parity_names_what_a_server_wrote():
    def zero_from(theirs):
        theirs[20:] = 0
        return theirs

    findings = [
        (lambda t: t, "agrees"),
        (zero_from, "rows are zero"),
        (lambda t: t.roll(1, dims=1), "ids are shifted"),
        (lambda t: t[:25], "without states"),
        (lambda t: torch.randn_like(t), "differs"),
    ]
    for change, finding in findings:
        for tap in verify.compare(*states_pairs(change)):
            assert finding in tap["finding"] and tap["agrees"] == (finding == "agrees")


def test_states_that_a_server_did_not_write_are_missed(tmp_path):
    """vLLM 0.32 on a CPU let go of its lock and had written nothing."""
    path = tmp_path / "cmpl-1.safetensors"
    Path(f"{path}.lock").touch()
    client = Mock(post=lambda *args: {"kv_transfer_params": {"hidden_states_path": str(path)}})
    with pytest.raises(
        UserError, match="no states at .*cmpl-1.safetensors, though their writer was done"
    ):
        verify.extracted(client, [1, 2])


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_servers_prompts_are_compared_turn_by_turn(tmp_path, turns):
    """With a template that drops earlier reasoning every turn has a row of its own."""
    target = tmp_path / "target"
    shutil.copytree(assets() / "tiny-hybrid", target)
    shutil.copy(Path(__file__).parents[1] / "templates/qwen3.jinja", target / "chat_template.jinja")
    path = write_config(
        tmp_path,
        target={"model": str(target)},
        prepare={"held_out": 0.5},
        regenerate={"enabled": False},
        tokenize={"turns": turns, "template_kwargs": {"enable_thinking": False}},
        evaluate={"max_prompts": 20},
    )
    said = [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "1.", "reasoning_content": "One."},
        {"role": "user", "content": "Second?"},
        {"role": "assistant", "content": "2."},
    ]
    chats = [[{**said[0], "content": f"First {i}?"}, *said[1:]] for i in range(12)]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    assert main(["prepare", str(path)]) == 0 and main(["tokenize", str(path)]) == 0
    cfg = configfile.load(path)
    samples = evaluate.held_out_prompts(cfg, tokenize_stage.finished(cfg))
    prompts = [{"sample_id": s.sample_id, "prompt_ids": prompt_of(s)} for s in samples]
    assert (max(s.sample_id for s in samples) >= ROW_STRIDE) == (turns == "all")
    tokenizer = load_tokenizer(cfg.target)

    class Server:
        name = "a server"

        def __init__(self, always):
            self.always = always

        def render(self, messages, tools, kwargs):
            text = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **{**self.always, **kwargs}
            )
            return tokenizer(text, add_special_tokens=False)["input_ids"]

    (
        tmp_path / "prompts.jsonl"
    ).unlink()  # a rented machine's files are gone; the run's own are here
    chats = serve_check._chats(cfg, prompts)
    for always, what in (
        ({"enable_thinking": False}, "same"),
        ({}, "same with our variables"),
        ({"chat_template": "{{ messages[0].content }}"}, "differs"),
    ):
        assert serve_check._template(Server(always), chats) == what
