"""`draftsmith inspect`: what the drafter is trained on. One sample with its supervised tokens marked,
in the terminal or as a page; or the summary by source, as text and as a picture.
"""

import html
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith import configfile, tables
from draftsmith import manifest as manifests
from draftsmith.config import RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.files import write_atomic

BEGIN_MARK, END_MARK = "[[supervised:", "]]"  # where there is no colour
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.5 ui-monospace, monospace; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.s {{ background: #c9f2cf; color: #111; }} .c {{ color: #8a5a00; font-weight: bold; }}
.i {{ color: #888; font-size: 70%; }} img {{ max-width: 100%; background: white; }}
td, th {{ padding: 0 1em; text-align: right; }} td:first-child, th:first-child {{ text-align: left; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }}
.s {{ background: #1d4d27; color: #eee; }} .c {{ color: #e0a030; }} }}
</style>
<h1>{title}</h1>
<p>{note}</p>
{body}
"""


@dataclass
class Lengths:
    """A source's samples: their lengths in tokens, and how many tokens are supervised."""

    tokens: list[np.ndarray] = field(default_factory=list)
    supervised: int = 0

    @property
    def all(self) -> np.ndarray:
        """Lengths [n]."""
        return np.concatenate(self.tokens)


def run(
    data: Path, *, sample: int | None, ids: bool, page: Path | None, picture: Path | None
) -> None:
    """Show a sample, or the summary; also as a page or a picture where a path is given."""
    _check_options(sample, ids, page, picture)
    cfg, folder, manifest = _find(data)
    if sample is None:
        found = _lengths(folder, manifest)
        _print_summary(found)
        if picture:
            write_atomic(picture, lambda path: _draw(found, path, picture.suffix[1:]))
            print(f"picture: {picture}")
        if page:
            _write_page(page, "Tokens by source", str(folder.parents[1]), _summary_html(found))
        return
    from draftsmith.target.load import load_tokenizer

    tokenizer = load_tokenizer(cfg.target)
    shown = _sample(folder, manifest, sample)
    special = set(tokenizer.added_tokens_decoder)
    runs = list(_runs(shown, special, each=ids))
    title, note = _heading(shown, sample)
    Console(soft_wrap=True).print(Text(f"{title}\n{note}\n"), _marked(tokenizer, runs, ids), sep="")
    if page:
        _write_page(page, title, note, f"<pre>{_marked_html(tokenizer, runs, ids)}</pre>")


def _check_options(sample: int | None, ids: bool, page: Path | None, picture: Path | None) -> None:
    """Raise UserError for options that do not go together, and for places that cannot be written."""
    if (ids and sample is None) or (picture and sample is not None):
        raise UserError(
            where="--ids" if ids and sample is None else "--picture",
            found="no --sample" if sample is None else f"--sample {sample}",
            expected="--ids with --sample, --picture without: it shows the whole set",
            remedy="Leave one of them out, or add what it needs.",
        )
    for option, path, suffixes in (
        ("--html", page, (".html", ".htm")),
        ("--picture", picture, (".png", ".svg")),
    ):
        if path is None:
            continue
        parent = next(p for p in path.absolute().parents if p.exists())
        if path.suffix in suffixes and not path.is_dir() and parent.is_dir():
            continue
        raise UserError(
            where=f"{option} {path}",
            found="a folder" if path.is_dir() else "a place for no such file",
            expected=f"a path that ends with {' or '.join(suffixes)}, in a folder",
            remedy="Choose another path.",
        )


def _find(data: Path) -> tuple[RunConfig, Path, dict[str, Any]]:
    """The run that `data` is, or lies in, and its tokens."""
    for root in (data.absolute(), *data.absolute().parents):
        if (root / "run.yaml").exists():
            cfg = configfile.load(root / "run.yaml")
            folder = root / "data" / "tokens"
            manifest = manifests.read(folder) if folder.exists() else None
            if manifest is None or not manifest["complete"]:
                break
            return cfg, folder, manifest
    raise UserError(
        where=str(data),
        found="no run with tokens",
        expected="a run's folder, or one inside it, after `draftsmith tokenize`",
        remedy="Run `draftsmith tokenize CONFIG` first.",
    )


def _sample(folder: Path, manifest: dict[str, Any], number: int) -> Sample:
    """The sample at this place, counted over all parts from 0."""
    at = number
    for name, entry in sorted(manifest["files"].items()):
        if 0 <= at < entry["rows"]:
            for batch in tables.batches(folder / name, 1024):
                if at < len(batch):
                    return Sample(**batch.slice(at, 1).to_pylist()[0])
                at -= len(batch)
        at -= entry["rows"]
    raise UserError(
        where="--sample",
        found=str(number),
        expected=f"0 to {tables.num_rows(manifest) - 1}",
        remedy="Choose one of them.",
    )


@dataclass(frozen=True)
class _Run:
    ids: list[int]
    supervised: bool
    special: bool


def _runs(sample: Sample, special: set[int], *, each: bool) -> Iterator[_Run]:
    """Tokens that are shown alike, together; `each`: one by one. A character that several tokens
    make is whole only in a run.
    """
    run: list[int] = []
    kind = (False, False)
    for token, bit in zip(sample.input_ids, sample.loss_mask, strict=True):
        now = (bool(bit), token in special)
        if run and (each or now != kind):
            yield _Run(run, *kind)
            run = []
        run, kind = [*run, token] if run else [token], now
    if run:
        yield _Run(run, *kind)


def _heading(sample: Sample, number: int) -> tuple[str, str]:
    total, supervised = len(sample.input_ids), sum(sample.loss_mask)
    title = f"Sample {number} (id {sample.sample_id}, {sample.source}, {sample.split})"
    share = 100 * supervised / total
    return title, f"{total} tokens, {supervised} supervised ({share:.1f}%), marked below"


def _marked(tokenizer: Any, runs: list[_Run], ids: bool) -> Text:
    """In colour on a terminal, else with marks around what is supervised."""
    text, plain, inside = Text(), not sys.stdout.isatty(), False
    for run in runs:
        if plain and run.supervised != inside:
            text.append(END_MARK if inside else BEGIN_MARK)
            inside = run.supervised
        style = "bold yellow" if run.special else ""
        text.append(
            tokenizer.decode(run.ids), f"{style} on dark_green" if run.supervised else style
        )
        if ids:
            text.append(f"[{run.ids[0]}]", "dim")
    return text.append(END_MARK if inside else "")


def _marked_html(tokenizer: Any, runs: list[_Run], ids: bool) -> str:
    out = []
    for run in runs:
        names = " ".join(n for n, on in (("s", run.supervised), ("c", run.special)) if on)
        shown = html.escape(tokenizer.decode(run.ids))
        out.append(f'<span class="{names}">{shown}</span>' if names else shown)
        if ids:
            out.append(f'<span class="i">{run.ids[0]} </span>')
    return "".join(out)


def _write_page(path: Path, title: str, note: str, body: str) -> None:
    text = PAGE.format(title=html.escape(title), note=html.escape(note), body=body)
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    print(f"page: {path}")


def _lengths(folder: Path, manifest: dict[str, Any]) -> dict[str, Lengths]:
    """Lengths and supervised tokens by source, part by part."""
    out: dict[str, Lengths] = {}
    for name in sorted(manifest["files"]):
        for batch in tables.batches(folder / name, 1024, ["source", "loss_mask"]):
            masks = batch["loss_mask"]
            offsets = masks.offsets.to_numpy()
            bits = np.concatenate([[0], np.cumsum(masks.values.to_numpy(), dtype=np.int64)])
            supervised = bits[offsets[1:]] - bits[offsets[:-1]]
            names = np.array(batch["source"].to_pylist())
            for source in np.unique(names):
                mine = out.setdefault(str(source), Lengths())
                mine.tokens.append(np.diff(offsets)[names == source])
                mine.supervised += int(supervised[names == source].sum())
    return out


def _edges(found: dict[str, Lengths]) -> np.ndarray:
    """Bins that double, around all lengths."""
    lengths = np.concatenate([mine.all for mine in found.values()])
    low, high = int(np.log2(max(lengths.min(), 1))), int(np.log2(max(lengths.max(), 1)))
    return 2 ** np.arange(low, high + 2)


def _rows(found: dict[str, Lengths]) -> Iterator[tuple[str, int, int, int, np.ndarray]]:
    """source, samples, tokens, supervised, histogram; then all together."""
    edges = _edges(found)
    for source, mine in sorted(found.items()):
        yield source, len(mine.all), int(mine.all.sum()), mine.supervised, _bins(mine.all, edges)
    whole = np.concatenate([mine.all for mine in found.values()])
    supervised = sum(mine.supervised for mine in found.values())
    yield "all", len(whole), int(whole.sum()), supervised, _bins(whole, edges)


def _bins(lengths: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(lengths, edges)[0]


def _print_summary(found: dict[str, Lengths]) -> None:
    table = Table()
    for name in ("source", "samples", "tokens", "supervised"):
        table.add_column(name, justify="left" if name == "source" else "right")
    edges = _edges(found)
    for edge in edges[:-1]:
        table.add_column(f"{edge:,}+", justify="right")
    for source, samples, tokens, supervised, bins in _rows(found):
        share = f"{100 * supervised / tokens:.1f}%"
        table.add_row(source, f"{samples:,}", f"{tokens:,}", share, *(f"{n:,}" for n in bins))
    Console().print("Samples by source; from 'supervised' on, by length in tokens.", table)


def _draw(found: dict[str, Lengths], path: Path, kind: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    names, edges = sorted(found), _edges(found)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=[3, 2])
    left.hist([found[n].all for n in names], edges, stacked=True, label=names)
    left.set(xlabel="tokens", ylabel="samples", title="Length")
    left.set_xscale("log", base=2)
    ticks = edges[:: len(edges) // 9 + 1]  # more would run into each other
    left.set_xticks(ticks, [f"{edge:,}" for edge in ticks])
    left.legend(fontsize=8)
    tokens = np.array([found[n].all.sum() for n in names])
    supervised = np.array([found[n].supervised for n in names])
    right.barh(names, tokens, color="lightgray", label="all")
    right.barh(names, supervised, label="supervised")
    right.set(xlabel="tokens", title="Tokens")
    right.invert_yaxis()  # the first source on top, as in the table
    right.locator_params(axis="x", nbins=4)
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.legend(fontsize=8)
    figure.tight_layout()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(path, format=kind, dpi=120, metadata=metadata)
    plt.close(figure)


def _summary_html(found: dict[str, Lengths]) -> str:
    import base64
    import tempfile

    rows = "".join(
        f"<tr><td>{html.escape(source)}<td>{samples:,}<td>{tokens:,}<td>{100 * supervised / tokens:.1f}%"
        for source, samples, tokens, supervised, _ in _rows(found)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.png"
        _draw(found, path, "png")
        picture = base64.b64encode(path.read_bytes()).decode()
    head = "<tr><th>source<th>samples<th>tokens<th>supervised"
    image = f'<img alt="lengths" src="data:image/png;base64,{picture}">'
    return f"<table>{head}{rows}</table>{image}"
