"""What is installed: the wheel holds the templates and the entry point."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_wheel_in_a_clean_place(tmp_path):
    """Built, installed apart from the sources, and a kernel rendered there."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("flce_inductor-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    templates = {f"flce_inductor/templates/{path.name}" for path in (ROOT / "templates").glob("*.jinja")}
    assert len(templates) >= 3 and templates <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "templates/"))]

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300)
    code = (
        "import flce_inductor, importlib.metadata as m\n"
        "from flce_inductor import kernels\n"
        f"assert flce_inductor.__file__.startswith({str(site)!r}), flce_inductor.__file__\n"
        f"assert str(kernels._template_dir()).startswith({str(site)!r})\n"
        "assert 'def rows(' in kernels.render(kernels.RowsKey(stats=True, grad=True, g_nll=True))\n"
        "assert 'flce_inductor' in m.entry_points(group='torch_dynamo_backends').names\n"
        "print(flce_inductor.__version__)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in wheel.name
