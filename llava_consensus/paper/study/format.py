"""The files the study leaves in its folder of results, which figures and tables are made of.

`study.json` says how selections inside the language model answer:

    {"description": {"model": ..., "data": ..., "limit": ..., "layer": 2, "versions": {...}, ...},
     "rows": [{"benchmark": "pope", "title": "POPE", "metric": "f1", "scale": 1.0, "chance": 50.0,
               "retention": 0.25, "scores": "recovery", "student": "vision", "rate": 0.1,
               "accuracy": 84.1, "interval": [82.3, 85.8], "questions": 1000,
               "agreement": 0.61, "disagreement": 0.39, "correction": 0.42,
               "gain": 1.3, "gain_interval": [0.2, 2.4], "p": 0.02}, ...]}

    benchmark, title, metric   what was asked, how papers write it, which number of its scorer `accuracy` is
    scale         what `accuracy` is divided by to be a percentage: 1, and 20 for MME
    chance        what guessing scores on these questions, in the unit of `accuracy`; older files do not have it
    retention     share of a picture's tokens that are left, rho; 1.0 for the row of all tokens
    scores        what tokens are ranked by: "vision", "cross", "recovery" (the student's ranking, corrected by the
                  teacher's), or "full" for all tokens
    student       "vision" or "cross", whose ranking comes first; null unless `scores` is "recovery"
    rate          r, share of the kept tokens that the teacher adds; null unless `scores` is "recovery"
    accuracy      the benchmark's own number, from 0 to 100 times `scale`
    interval      of it, 95 %, bootstrap over questions; null where the scorer's rows do not make it up
    questions     how many were answered
    agreement     overlap of the two sides' K best tokens as a share of K, mean over pictures; null for all tokens
    disagreement  1 - agreement
    correction    correction factor, mean over pictures; null unless `scores` is "recovery"
    gain          accuracy less that of the student alone; null unless `scores` is "recovery"
    gain_interval, p   of the gain, paired by question; null where `gain` is, or where rows do not make up a score

`scap.json` says how SCAP, which is the attention of the first layer, compares with the attention of every layer:

    {"description": {...}, "benchmark": "gqa", "questions": 400, "retention": 0.25,
     "layers": [{"layer": 1, "aggregate": "all", "correlation": 1.0, "overlap": 1.0}, ...],
     "positions": [{"rotated": true, "saliency": [...]}, {"rotated": false, "saliency": [...]}]}

    layer         a decoder layer, counted from 1
    aggregate     how the rows of the text become one saliency, of SCAP and of the layer alike: "all", "last" or "max"
    correlation   Spearman's rank correlation of SCAP with the layer's own attention, mean over pictures
    overlap       share of SCAP's K best tokens that are among the layer's K best, K = retention times their number
    positions     SCAP's mean saliency (aggregate "all") with and without rotation of queries and keys, by patch index:
                  that of each of 24 equal stretches, from the first patch to the last. It is a multiple of what each
                  patch would have if all had the same, so 1 is no preference.

`positions.json` says what closing up the positions of the tokens that stay does:

    {"description": {...}, "benchmark": "textvqa", "title": "TextVQA", "scale": 1.0, "tokens": 64,
     "layers": [{"closed_from": null, "accuracy": 78.1, "interval": [...], "difference": null, ...}, ...],
     "questions": 100, "attention": [{"positions": "full", "layer": 1, "stretches": [...], "visual": 0.31}, ...]}

    closed_from   the first decoder layer, counted from 0, whose positions are closed up; null is none of them, the row
                  that the others are compared with; "full" stands for all tokens
    accuracy, interval   as in study.json
    difference, difference_interval, p   to the row whose positions are closed up nowhere, paired by question
    questions     how many were looked at for `attention`
    positions     "full" (all tokens), "renumber" or "keep", of ConsensusDrop
    layer         a decoder layer, counted from 1
    stretches     share of the last prompt word's attention in each equal stretch of patch indices, mean over heads
    visual        their sum

A null number was not measured, or means nothing there. Rows stand in the order they were run.
"""

STUDY, SCAP, POSITIONS = "study.json", "scap.json", "positions.json"
RUNS = "study"  # folder in that of results, so that tables of methods do not mix with the study's selections
STRETCHES = 24  # of patch indices; the rows of LLaVA-1.5's grid
