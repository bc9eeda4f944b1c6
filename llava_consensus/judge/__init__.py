"""The judge: a model that grades answers no rule can, asked once, within bounds, and on record.

    panels.py   which benchmarks have one: mmvet.py, video.py     prompts.py  official prompts by `ast`, or wording.py
    client.py   asks an OpenAI-compatible server in bounded time  store.py    every request and reply, append-only
    run.py      one judged run: estimate, ask, report             cost.py     tokens and money, before and after

`llava-consensus judge mmvet --answers FILE --data DIR --judge-model M` does it all; a rerun asks nothing again.
"""
