"""After a model is loaded or wrapped, blocks as large as attention maps are not mapped anew each time."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from llava_consensus.hosts.environment import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    maps = [torch.ones(5 << 20, dtype=torch.uint8) for _ in range(4)]
    del maps
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
mapped_anew = faults()
keep_freed_memory()
for _ in range(3):  # until the heap has grown to what is needed, which depends on where it began
    faults()
print(mapped_anew, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back in this way")
def test_large_blocks_are_taken_from_what_was_freed() -> None:
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    before, after = map(int, told.split())
    assert before > 1000 and after < 100
