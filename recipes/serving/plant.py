"""A copy of an export with one mistake planted, to see that serve-check names it.

python recipes/serving/plant.py RUN/export OUT taps|causal|theta|mask
"""

import json
import shutil
import sys
from pathlib import Path


def plant(export: Path, out: Path, mistake: str) -> None:
    """Change one thing in config.json; the weights stay."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(export, out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    nested = config["dflash_config"]
    if mistake == "taps":
        nested["target_layer_ids"] = [tap - 1 for tap in nested["target_layer_ids"]]
    elif mistake == "causal":
        nested["causal"] = True
    elif mistake == "theta":
        theta = 1e4 if config["rope_theta"] != 1e4 else 1e7
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = theta
    elif mistake == "mask":
        nested["mask_token_id"] = 0
    else:
        raise SystemExit(__doc__)
    path.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    plant(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
