"""Makes tests/golden/qwen_vl.npz and internvl_chat.npz with the authors' code, which is run and not copied. The folder
is the one of docs/remote-code.md, "The real code":

    REMOTE_CODE=FOLDER PYTHONPATH=FOLDER/internvl_chat:.:tests .venv-pinned/bin/python tests/golden/make_remote.py
"""

import sys
import tempfile
from pathlib import Path

import numpy
import remote_code
from remote_cases import double, recorded

for name in ("qwen_vl", "internvl_chat"):
    if not remote_code.held(name):
        sys.exit(f"REMOTE_CODE={remote_code.FOLDER}: {name} is not in it")
    with tempfile.TemporaryDirectory() as folder:
        numpy.savez_compressed(Path(__file__).parent / f"{name}.npz", **recorded(double(name, Path(folder))))
