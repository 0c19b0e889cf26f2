"""`make dist`: builds wheel and sdist, and uses the wheel where there is no checkout.

    python tests/dist/check_dist.py [--skip-training]

1. A bare environment: an episode with reward 1.0 and an evaluation; none of the libraries of an extra is there.
2. The same environment with the extra `jax`: two small updates of `tbx train`.

Everything runs in a temporary folder, with PYTHONPATH empty. Fails at the first thing that is not as it should be, and
prints what was measured.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[2]
ABSENT = ("jax", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers", "safetensors", "huggingface-hub")
ABSENT = (*ABSENT, "torch", "scipy", "bm25s", "numba", "matplotlib", "rich", "pygments")
# Files alone. What Python compiles of them at the installation comes on top, and `pip --no-compile` leaves it out.
MOST_BARE_MB = 120
INSTALLER = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "wheel")

WANTED = (
    "tbx_conf/train.yaml",
    "tbx_conf/experiment/smoke.yaml",
    "tbx_envs/py.typed",
    "tbx_jax/py.typed",
    "tbx_envs/domains/clinic/rules.md",
    "tbx_envs/domains/clinic/tasks.lock",
    "tbx_envs/thinkingbox/dataset/benchmark.lock",
    "tbx_envs/thinkingbox/grading/worker/__main__.py",
    "tbx_envs/thinkingbox/grading/worker/check_server/running.py",
    "tbx_envs/thinkingbox/grading/worker/thinkingbox/common/judge.py",
    "tbx_envs/thinkingbox/search/stand_in.py",
    "tbx_envs/thinkingbox/servers/fork_server.py",
    "tbx_envs/thinkingbox/supervision/children.py",
    "tbx_jax/policies/nano/model.safetensors",
    "tbx_jax/policies/nano/tokenizer.json",
    "tbx_jax/policies/nano/chat_template.jinja",
)

EPISODE = """
import tbx_envs

task = tbx_envs.find_task("clinic/cancel_visit/000")
env = tbx_envs.make(task.uid)
observation, info = env.reset(seed=0)
for call in task.expected_calls:
    env.step(tbx_envs.Turn(calls=(tbx_envs.ToolCall("", call.tool, call.arguments),)))
observation, reward, terminated, truncated, info = env.step("It is done. <DONE>")
assert terminated and reward == 1.0, info["check"]
"""
WHERE = "import sys, tbx_envs; print(tbx_envs.__file__)"
HEAVY = "import sys, tbx_envs; assert not {'numpy.testing', 'scipy', 'jax', 'mcp', 'sqlalchemy'} & set(sys.modules)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the distribution and use it without the checkout.")
    parser.add_argument("--skip-training", action="store_true", help="leave out the extra `jax`, most of the time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tbx-dist-") as name:
        folder = pathlib.Path(name)
        wheel, _ = build(folder)
        python = bare_environment(folder, wheel)
        use_bare(python, folder)
        if not given.skip_training:
            use_trainer(python, folder, wheel)
    print("all of it works without the checkout")


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Wheel and sdist in `dist/`, the wheel built out of the sdist; what is in them is what should be."""
    distributions = ROOT / "dist"
    for old in distributions.glob("tbx_envs-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", distributions, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *distributions.iterdir())
    (wheel,), (sdist,) = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    require(not (absent := [name for name in WANTED if name not in names]), f"{wheel.name} lacks {absent}")
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    require(tops == {"tbx_envs", "tbx_jax", "tbx_conf"}, f"{wheel.name} holds {sorted(tops)}")
    in_git = run("git", "-C", ROOT, "ls-files", "tbx_envs", "tbx_jax", "conf").split()
    there = {name.replace("tbx_conf/", "conf/", 1) for name in names if ".dist-info" not in name}
    require(there == set(in_git), f"{wheel.name} and git differ: {sorted(there ^ set(in_git))}")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    require({"setup.cfg", "README.md", "LICENSE", "conf/train.yaml"} <= files, f"{sdist.name} lacks its sources")
    print(f"wheel {megabytes([wheel]):.1f} MB, {len(names)} files; sdist {megabytes([sdist]):.1f} MB")
    return wheel, sdist


def bare_environment(folder: pathlib.Path, wheel: pathlib.Path) -> pathlib.Path:
    """Its Python, after `pip install` of the wheel and nothing else."""
    venv.create(folder / "bare", with_pip=True)
    python = folder / "bare" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    listed = run(python, "-m", "pip", "list", "--format=freeze").splitlines()
    installed = {line.partition("==")[0].lower().replace("_", "-") for line in listed} - {"pip", "setuptools"}
    require(not (found := installed & set(ABSENT)), f"a bare installation brings {sorted(found)}")
    packages = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    files = [
        file
        for file in packages.rglob("*")
        if file.is_file() and not file.relative_to(packages).parts[0].startswith(INSTALLER)
    ]
    compiled = [file for file in files if file.suffix == ".pyc"]
    size = megabytes(set(files) - set(compiled))
    print(f"bare environment {size:.0f} MB, and {megabytes(compiled):.0f} MB of compiled Python")
    print(f"  {len(installed)} packages: {' '.join(sorted(installed))}")
    require(size <= MOST_BARE_MB, f"a bare installation takes {size:.0f} MB, more than {MOST_BARE_MB}")
    return python


def use_bare(python: pathlib.Path, folder: pathlib.Path) -> None:
    """An episode and an evaluation, and a command whose extra is missing."""
    where = run(python, "-c", WHERE, cwd=folder).strip()
    require(where.startswith(str(folder)), f"the checkout was imported, not the wheel: {where}")
    run(python, "-c", HEAVY, cwd=folder)
    run(python, "-c", EPISODE, cwd=folder)
    tbx = python.parent / "tbx"
    table = run(tbx, "evaluate", "policy=oracle", "tasks=clinic/*/000", "attempts=1", "output_dir=oracle", cwd=folder)
    last = table.strip().splitlines()[-1].split()
    require(last[:3] == ["all", "8", "100.0%"], f"the oracle does not pass:\n{table}")
    print(f"oracle: {' '.join(last)}")
    refused = subprocess.run(
        [tbx, "train", "+experiment=smoke"], cwd=folder, env=environment(), capture_output=True, text=True
    )
    hint = "pip install 'tbx-envs[jax]'"
    require(refused.returncode == 2 and hint in refused.stderr, f"tbx train without JAX says:\n{refused.stderr}")
    print(refused.stderr.strip().splitlines()[-1])


def use_trainer(python: pathlib.Path, folder: pathlib.Path, wheel: pathlib.Path) -> None:
    """The extra `jax`, and two small updates."""
    run(python, "-m", "pip", "install", "--quiet", f"tbx-envs[jax] @ {wheel.as_uri()}")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    print(run(python.parent / "tbx", "train", "+experiment=smoke", "output_dir=smoke", cwd=elsewhere).strip())
    steps = (elsewhere / "smoke" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    require(len(steps) == 2 and (elsewhere / "smoke" / "policy" / "model.safetensors").is_file(), "no trained policy")


def run(*command: str | pathlib.Path, cwd: pathlib.Path | None = None) -> str:
    """What it printed; ends the check when it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment(), capture_output=True, text=True)
    shown = " ".join(str(part) for part in command)
    require(done.returncode == 0, f"{shown[:200]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    """Nothing that leads to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def require(holds: bool, words: str) -> None:
    if not holds:
        raise SystemExit(f"make dist: {words}")


def megabytes(files: Iterable[pathlib.Path]) -> float:
    return sum(file.stat().st_size for file in files) / 1e6


if __name__ == "__main__":
    main()
