"""The judge's prompts in this project's own words, used where no official script is at hand.

They have the official structure (a table to be completed for MM-Vet; a system and a user message for video QA;
two examples and the case for MMBench, in the language of the question), so that
replies are read the same way. Grades given under them are not those of the official prompts: the record of a judged
run says which were used (`prompts.py`).
"""

_TABLE = """\
You grade the answers of an AI model. Each row of the table below holds a question, the correct answer, the model's \
answer, and a grade from 0.0 (wrong) to 1.0 (fully correct) in steps of 0.1. Where the correct answer joins parts with \
<AND>, the model's answer must contain all of them for the full grade, and earns a share for some; where it joins them \
with <OR>, any one is enough. Other words that mean the same are as good. Complete the last row: write its grade, a \
number, and nothing else.

Question | Correct answer | Model's answer | Grade
--- | --- | --- | ---
Which fruits lie on the table? | apple <AND> pear | a pear and an apple | 1.0
Which fruits lie on the table? | apple <AND> pear | only apples | 0.5
Which fruits lie on the table? | apple <AND> pear | a bowl of grapes | 0.0
What time is it on the clock? | 3:15 <OR> a quarter past three | It is quarter past 3. | 1.0
What time is it on the clock? | 3:15 <OR> a quarter past three | shortly after three | 0.4
Why is the boy laughing? | The dog beside him wears his hat and looks very serious. | There is a dog near him. | 0.3
Why is the boy laughing? | The dog beside him wears his hat and looks very serious. | His dog has got his hat on. | 0.8
"""

MM_VET = (("user", (_TABLE + "\n", "question", " | ", "answer", " | ", "prediction", " | ")),)
MM_VET_REMINDER = "\nThe grade, as a number from 0.0 to 1.0: "

_SYSTEM = """\
You check answers to questions about videos. For each you are given the question, the correct answer and the answer of \
a model; decide whether the model's answer means the same as the correct one.
- What counts is the meaning, not the wording: synonyms and paraphrases are right.
- More detail than asked for is fine as long as it contradicts nothing.
- Judge against the correct answer only, not against what you think the video shows."""

_ASK = """

Reply with a Python dictionary and nothing else, no explanation and no code fence. Its key 'pred' holds 'yes' if the \
answers match and 'no' if they do not; its key 'score' holds an integer from 0 (nothing in common) to 5 (the same \
meaning). For example: {'pred': 'no', 'score': 1}"""

VIDEO_QA = (
    ("system", (_SYSTEM,)),
    (
        "user",
        ("Question: ", "question", "\nCorrect answer: ", "answer", "\nAnswer of the model: ", "prediction", _ASK),
    ),
)

_CHOOSE = """\
Somebody answered a multiple-choice question in free words. Say which option those words stand for: reply with its \
letter alone. If they fit none of the options, reply with Z.

Question: Which animal sits on the roof? Options: A. a pigeon B. a squirrel C. a tabby D. a hen
Answer: some kind of cat
Letter: C

Question: Which animal sits on the roof? Options: A. a pigeon B. a squirrel C. a tabby D. a hen
Answer: a weathervane
Letter: Z

"""
_CHOOSE_CN = """\
有人用自己的话回答了一道选择题。请指出这个回答对应哪一个选项，并且只写该选项的字母；若与各选项都不符，就写 Z。

题目：屋顶上是什么动物？ 选项：A. 鸽子 B. 松鼠 C. 花猫 D. 母鸡
回答：好像是一只猫咪
字母：C

题目：屋顶上是什么动物？ 选项：A. 鸽子 B. 松鼠 C. 花猫 D. 母鸡
回答：风向标
字母：Z

"""

MMBENCH = (
    ("user", (_CHOOSE + "Question: ", "question", " Options: ", "options", "Answer: ", "prediction", "\nLetter: ")),
)
MMBENCH_CN = (("user", (_CHOOSE_CN + "题目：", "question", " 选项：", "options", "回答：", "prediction", "\n字母：")),)
