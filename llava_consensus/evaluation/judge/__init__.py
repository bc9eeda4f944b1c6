"""The judge: a model that grades answers no rule can, asked once, within bounds, and on record.

    grader.py    what a benchmark needs to be judged     mmvet.py, video_qa.py, mmbench.py   one grader each, whole:
    graders.py   GRADERS, the only list of them          what is asked, the prompt, what is read, what is reported
    client.py    asks an OpenAI-compatible server        prompts.py   a prompt with slots, and its known versions
    store.py     every request and reply, append-only    grading.py   one dialogue about one answer
    run.py       one judged run, start to end            cost.py, summary.py   money and tokens; lines for people

`llava-consensus judge mmvet --answers FILE --data DIR --judge-model M` does it all; a rerun asks nothing again.
"""
