"""LLaMA-Factory, its own command line unmodified, trains on this package's drop-in: `make test-llamafactory`.

Run it with any Python 3.11 or later; it makes an environment of its own, which a second run finds again. badam is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PACKAGES = ["llamafactory==0.9.5", "torch==2.13.0"]

COMMON = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "numbers",
    "template": "default",
    "cutoff_len": 48,
    "preprocessing_num_workers": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.25,
    "warmup_steps": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "save_steps": 100,
    "report_to": "none",
    "use_cpu": True,
    "use_badam": True,
    "badam_switch_interval": 1,
    "overwrite_output_dir": True,
}
LONG = {
    "max_steps": 7,
    "save_steps": 3,
    "bf16": True,
    "gradient_accumulation_steps": 2,
    "badam_switch_interval": 2,
    "badam_switch_mode": "random",
}
RUNS = {
    # name: (settings, blocks that train at each step)
    "random": (LONG, None),
    "ascending": ({"badam_switch_mode": "ascending"}, [0, 1, 2, 0]),
    "descending from 1": ({"badam_switch_mode": "descending", "badam_start_block": 1}, [1, 0, 2, 1]),
    "fixed": ({"badam_switch_mode": "fixed", "gradient_accumulation_steps": 2}, [0, 0, 0, 0]),
    "interval -1": ({"badam_switch_mode": "ascending", "badam_switch_interval": -1}, [0, 0, 0, 0]),
    "ratio, adjacent": ({"badam_mode": "ratio", "badam_update_ratio": 0.25}, [0, 0, 0, 0]),
    "ratio, scatter": ({"badam_mode": "ratio", "badam_update_ratio": 0.25, "badam_mask_mode": "scatter"}, [0, 0, 0, 0]),
    "random, resumed": (LONG, None),
}


def make_environment(folder: Path) -> Path:
    """Python of an environment with LLaMA-Factory and this package as it is now."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    with tempfile.TemporaryDirectory() as wheels, ThreadPoolExecutor() as pool:
        building = pool.submit(pip, python, "wheel", "--no-deps", "--wheel-dir", wheels, str(REPOSITORY))
        if not (folder / "ready").exists():
            pip(python, "install", "--no-compile", *PACKAGES)
            # Their builds do not match a CPU build of torch; LLaMA-Factory imports torchaudio, but needs nothing from it here.
            pip(python, "uninstall", "--yes", "torchvision", "torchaudio")
            site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
            Path(site.strip(), "torchaudio.py").touch()
            (folder / "ready").touch()
        building.result()
        pip(python, "install", "--no-deps", "--force-reinstall", *map(str, Path(wheels).iterdir()))
    return python


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def start(python: Path, *command: str, log: Path) -> str:
    """Run a program under `badam_kernels run`; what it said."""
    began = time.perf_counter()
    done = subprocess.run(
        [python, "-m", "badam_kernels", "run", "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(log.parent), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=log.parent,
    )
    log.write_text(done.stdout)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    print(f"{log.stem}: {time.perf_counter() - began:.0f} s", flush=True)
    return done.stdout


def train(python: Path, data: Path, name: str, settings: dict, resume: Path | None = None) -> Path:
    out = data / name.replace(" ", "_").replace(",", "")
    shutil.rmtree(out, ignore_errors=True)
    paths = {"model_name_or_path": str(data / "model"), "dataset_dir": str(data), "output_dir": str(out)}
    config = COMMON | settings | paths | ({"resume_from_checkpoint": str(resume)} if resume else {})
    file = data / f"{out.name}.yaml"
    file.write_text(json.dumps(config))  # which is YAML too; its reader of .json files is broken
    said = start(python, "llamafactory-cli", "train", str(file), log=data / f"{out.name}.log")
    kind = "BlockOptimizerRatio" if settings.get("badam_mode") == "ratio" else "BlockOptimizer"
    expect(f".{kind}: " in said and "badam_kernels.integrations." in said, f"{name}: the log does not show that our {kind} ran")
    return out


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(otherwise)


def history(out: Path) -> list[dict]:
    state = json.loads((out / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def check_blocks(name: str, out: Path, expected: list[int] | None) -> None:
    entries = history(out)
    blocks = [entry["block"] for entry in entries]
    if expected is None:
        expect(blocks[0:6:2] == blocks[1:6:2] and sorted(blocks[:6:2]) == [0, 1, 2], f"{name}: trained blocks {blocks}")
    else:
        expect(blocks == expected, f"{name}: trained blocks {blocks}, expected {expected}")
    expect(all(entry["grad_norm"] > 0 for entry in entries), f"{name}: no gradient norm")


COMPARE = """
import sys, torch
from safetensors.torch import load_file
a, b = sys.argv[1:]
x, y = (load_file(f"{out}/model.safetensors") for out in (a, b))
assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x), "weights differ"
s, t = (torch.load(f"{out}/checkpoint-7/optimizer.pt", weights_only=True) for out in (a, b))
assert [g["weight_decay"] for g in s["param_groups"]] == [0.0, 0.25], s["param_groups"]
assert s["badam_kernels"] == t["badam_kernels"]
for key, entry in s["state"].items():
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(t["state"][key][k])) for k, v in entry.items()), key
print(len(x), "weights and", len(s["state"]), "states are equal, bit for bit")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, required=True, help="folder of the environment; made if it is not there")
    parser.add_argument("--out", type=Path, required=True, help="folder for model, data, runs and their logs; emptied first")
    options = parser.parse_args()
    began = time.perf_counter()
    python, data = make_environment(options.environment.absolute()), options.out.absolute()
    print(f"environment: {time.perf_counter() - began:.0f} s", flush=True)
    shutil.rmtree(data, ignore_errors=True)
    subprocess.run([python, HERE / "prepare.py", data], check=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one thread each
        web = [python, "python", str(HERE / "web.py"), str(data), str(data / "web")]
        done = {"web interface": pool.submit(start, *web, log=data / "web.log")}
        for name, (settings, _) in RUNS.items():
            resume = done["random"].result() / "checkpoint-3" if name == "random, resumed" else None
            done[name] = pool.submit(train, python, data, name, settings, resume)
        outs = {name: run.result() for name, run in done.items()} | {"web interface": data / "web"}
    for name, (_, blocks) in RUNS.items():
        check_blocks(name, outs[name], blocks)
    check_blocks("web interface", outs["web interface"], [2, 1, 0, 2])
    subprocess.run([python, "-c", COMPARE, outs["random"], outs["random, resumed"]], check=True)
    print(f"{len(RUNS) + 1} passed, 0 failed\nin {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
