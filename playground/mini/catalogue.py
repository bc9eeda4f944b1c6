"""What a mini scene can contain: objects, their emoji, categories, natural colours, Chinese names and themes.

Plain data, read by the renderer, the question writer and the tokenizer. An object is one word; an object with
several colours has one emoji for each of them, so that "what color is the heart" can only be answered by looking.
"""

from __future__ import annotations

# name: (category, Chinese name, {colour: emoji}); the colour "" means that nobody is asked about it.
OBJECTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "dog": ("animal", "狗", {"": "🐶"}),
    "cat": ("animal", "猫", {"yellow": "🐱"}),
    "panda": ("animal", "熊猫", {"": "🐼"}),
    "frog": ("animal", "青蛙", {"green": "🐸"}),
    "pig": ("animal", "猪", {"pink": "🐷"}),
    "fox": ("animal", "狐狸", {"orange": "🦊"}),
    "turtle": ("animal", "乌龟", {"green": "🐢"}),
    "fish": ("animal", "鱼", {"": "🐠"}),
    "bee": ("animal", "蜜蜂", {"": "🐝"}),
    "butterfly": ("animal", "蝴蝶", {"": "🦋"}),
    "penguin": ("animal", "企鹅", {"": "🐧"}),
    "elephant": ("animal", "大象", {"": "🐘"}),
    "apple": ("fruit", "苹果", {"red": "🍎", "green": "🍏"}),
    "banana": ("fruit", "香蕉", {"yellow": "🍌"}),
    "grape": ("fruit", "葡萄", {"purple": "🍇"}),
    "cherry": ("fruit", "樱桃", {"red": "🍒"}),
    "lemon": ("fruit", "柠檬", {"yellow": "🍋"}),
    "watermelon": ("fruit", "西瓜", {"": "🍉"}),
    "pineapple": ("fruit", "菠萝", {"": "🍍"}),
    "strawberry": ("fruit", "草莓", {"red": "🍓"}),
    "pizza": ("food", "披萨", {"": "🍕"}),
    "burger": ("food", "汉堡", {"": "🍔"}),
    "cake": ("food", "蛋糕", {"": "🎂"}),
    "donut": ("food", "甜甜圈", {"": "🍩"}),
    "egg": ("food", "鸡蛋", {"": "🍳"}),
    "carrot": ("food", "胡萝卜", {"orange": "🥕"}),
    "corn": ("food", "玉米", {"": "🌽"}),
    "cheese": ("food", "奶酪", {"yellow": "🧀"}),
    "car": ("vehicle", "汽车", {"red": "🚗", "blue": "🚙"}),
    "bus": ("vehicle", "公交车", {"": "🚌"}),
    "plane": ("vehicle", "飞机", {"": "✈"}),
    "boat": ("vehicle", "帆船", {"": "⛵"}),
    "rocket": ("vehicle", "火箭", {"": "🚀"}),
    "bicycle": ("vehicle", "自行车", {"": "🚲"}),
    "tractor": ("vehicle", "拖拉机", {"": "🚜"}),
    "train": ("vehicle", "火车", {"": "🚆"}),
    "hat": ("clothing", "帽子", {"black": "🎩"}),
    "shirt": ("clothing", "衬衫", {"": "👕"}),
    "dress": ("clothing", "裙子", {"blue": "👗"}),
    "crown": ("clothing", "皇冠", {"yellow": "👑"}),
    "boot": ("clothing", "靴子", {"brown": "👢"}),
    "sock": ("clothing", "袜子", {"": "🧦"}),
    "rose": ("plant", "玫瑰", {"red": "🌹"}),
    "sunflower": ("plant", "向日葵", {"yellow": "🌻"}),
    "tree": ("plant", "树", {"green": "🌳"}),
    "cactus": ("plant", "仙人掌", {"green": "🌵"}),
    "mushroom": ("plant", "蘑菇", {"red": "🍄"}),
    "clover": ("plant", "三叶草", {"green": "☘"}),
    "key": ("tool", "钥匙", {"": "🔑"}),
    "hammer": ("tool", "锤子", {"": "🔨"}),
    "clock": ("tool", "闹钟", {"": "⏰"}),
    "camera": ("tool", "相机", {"": "📷"}),
    "lamp": ("tool", "灯泡", {"yellow": "💡"}),
    "book": ("tool", "书", {"red": "📕", "green": "📗", "blue": "📘", "orange": "📙"}),
    "ball": ("toy", "球", {"": "⚽"}),
    "balloon": ("toy", "气球", {"red": "🎈"}),
    "guitar": ("toy", "吉他", {"": "🎸"}),
    "drum": ("toy", "鼓", {"": "🥁"}),
    "heart": ("shape", "心", {"red": "❤", "orange": "🧡", "yellow": "💛", "green": "💚", "blue": "💙", "purple": "💜"}),
    "circle": (
        "shape",
        "圆",
        {"red": "🔴", "orange": "🟠", "yellow": "🟡", "green": "🟢", "blue": "🔵", "purple": "🟣"},
    ),
    "square": (
        "shape",
        "方块",
        {"red": "🟥", "orange": "🟧", "yellow": "🟨", "green": "🟩", "blue": "🟦", "purple": "🟪"},
    ),
    "diamond": ("shape", "菱形", {"orange": "🔶", "blue": "🔷"}),
}
NAMES = list(OBJECTS)
CATEGORY = {name: row[0] for name, row in OBJECTS.items()}
CATEGORIES = sorted(set(CATEGORY.values()))
CHINESE = {name: row[1] for name, row in OBJECTS.items()}
COLOURS = {"red": "红色", "orange": "橙色", "yellow": "黄色", "green": "绿色", "blue": "蓝色", "purple": "紫色",
           "pink": "粉色", "brown": "棕色", "black": "黑色"}  # fmt: skip
CATEGORY_CHINESE = {"animal": "动物", "fruit": "水果", "food": "食物", "vehicle": "交通工具", "clothing": "衣物",
                    "plant": "植物", "tool": "工具", "toy": "玩具", "shape": "形状"}  # fmt: skip
VARIANTS = [name for name, row in OBJECTS.items() if len(row[2]) > 1]
PLURAL = {"butterfly": "butterflies", "cherry": "cherries", "strawberry": "strawberries", "fish": "fish",
          "bus": "buses", "cactus": "cacti", "dress": "dresses"}  # fmt: skip

# Objects that like each other's company: a scene draws most of its objects from one theme. POPE's popular and
# adversarial negatives mean something only because of this and of the popularity below.
THEMES: dict[str, list[str]] = {
    "farm": ["pig", "dog", "tractor", "carrot", "corn", "tree", "egg", "sunflower", "bee", "apple"],
    "shore": ["fish", "turtle", "boat", "penguin", "ball", "watermelon", "pineapple", "bicycle", "circle", "book"],
    "kitchen": ["pizza", "burger", "cake", "donut", "egg", "cheese", "lemon", "banana", "cherry", "apple"],
    "street": ["car", "bus", "bicycle", "train", "cat", "dog", "clock", "pizza", "square", "balloon"],
    "garden": ["rose", "sunflower", "tree", "mushroom", "clover", "cactus", "bee", "butterfly", "frog", "strawberry"],
    "office": ["key", "lamp", "book", "clock", "camera", "hammer", "plane", "donut", "square", "diamond"],
    "party": ["balloon", "cake", "guitar", "drum", "crown", "hat", "heart", "grape", "rocket", "circle"],
    "wardrobe": ["shirt", "dress", "boot", "sock", "hat", "crown", "camera", "heart", "rose", "key"],
    "wild": ["panda", "fox", "elephant", "turtle", "frog", "butterfly", "mushroom", "banana", "cactus", "tree"],
    "shapes": ["heart", "circle", "square", "diamond", "book", "apple", "car", "ball", "rocket", "plane"],
}
POPULARITY = {name: 0.35 for name in NAMES} | {
    "heart": 2.0, "car": 2.0, "circle": 1.6, "square": 1.6, "apple": 1.8, "dog": 1.5, "book": 1.8, "tree": 1.4,
    "cat": 1.2, "ball": 1.0, "clock": 0.9, "diamond": 1.0, "banana": 0.8, "cake": 0.8, "fish": 0.7,
}  # fmt: skip

# No 0/O, 1/I, 5/S, 2/Z, 8/B, 6/G, V/U, D/Q: a person and a small model read these alike.
SIGN_ALPHABET = "ACEFHJKLMNPRTUXY234679"


def plural(name: str) -> str:
    return PLURAL.get(name, name + "s")


def variant_keys() -> list[tuple[str, str]]:
    """Every (name, colour) that has a glyph, in the order of the glyph sheet."""
    return [(name, colour) for name, row in OBJECTS.items() for colour in row[2]]
