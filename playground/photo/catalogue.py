"""Names and categories of the cut-outs, and the photographs that they are pasted on.

Every name covers all cut-outs that a person would call so. Drawings are left out, and so is every photograph that shows
one of the names, because a "no" about it would be wrong.
"""

from __future__ import annotations

import functools

from PIL import Image

from playground.photo.paths import WORK

STAMPS = "photographs/usr/share/tuxpaint/stamps"
PICTURES = "photographs/usr/share/doc/opencv-doc"
TABLE = {  # category: name=cut-out+cut-out
    "bird": "parrot=adelaide-rosella+rainbow-lorikeet peacock=peacock+albino_peahen blackbird=blackbird "
    "chicken=hen+chicken_profile crow=crow crane=crowned_crane cuckoo=cuckoo duck=duck+drake goose=gander "
    "guineafowl=guineafowl+helmeted_guineafowl heron=heron_greatblue+heron_greatblue_flying lark=lark "
    "penguin=penguin+magellanic_penguin+little-penguin magpie=magpie ostrich=ostrich+nandou owl=owl pelican=pelican "
    "pigeon=pigeon flamingo=pink_flamingo rooster=rooster seagull=seagull+silver-gull toucan=tucan turkey=turkey "
    "vulture=vulture",
    "fish": "clownfish=clownfish lionfish=lionfish seahorse=seahorse grouper=bluegroper+coraltrout "
    "butterflyfish=butterflyfish",
    "insect": "grasshopper=grasshopper wasp=hornet fly=hoverfly mantis=mantis moth=xanthia bee=bee",
    "mammal": "monkey=chimp+tamarin_emperor gorilla=gorilla dolphin=dolphin whale=orca+whale otter=otter seal=sea_lion "
    "bear=bear+european-bear bison=bison bull=bull+zebu cow=cow+cow_white "
    "antelope=gnu-stand+indian_blackbuck+gnu-baby+gnu-baby-stand+gnu-sitting goat=goat+mountaingoat "
    "sheep=sheep+ram+sheep_lamb yak=yak camel=camel+dromedary lion=lion-2+lion tiger=tiger+tiger_sumatran "
    "deer=deer+doe+wapiti+caribou dog=dog+dingo fox=fox elephant=elephant donkey=donkey+donkey_eating horse=horse "
    "zebra=zebra ferret=ferret giraffe=giraffe hippo=hippopotamus pig=pig+pig_golden+pig_golden2 "
    "rabbit=rabbit+rabbit-2+rabbit_little rhino=rhino_black beaver=beaver capybara=capybara marmot=marmot mouse=mouse "
    "rat=rat squirrel=squirrel boar=wildboar kangaroo=kangaroo koala=koala wombat=wombat badger=badger",
    "fruit": "apricot=apricot+Apricot_whole cherry=Cherry_Stella strawberry=Strawberry2 avocado=avocado kiwi=kiwi "
    "orange=mandarine+orange_seville banana=banana lemon=lemon pineapple=pineapple grapes=grapes",
    "vegetable": "ginger=ginger broccoli=broccoli corn=corn mushroom=cep+cep-1+cep-2 pepper=yellowpepper onion=onion",
    "instrument": "trumpet=trumpet cymbal=cymbal_crash drum=drum_tomtom_floor+drumkit cello=cello "
    "guitar=guitar_classical+guitar2+guitar_electric+guitar_electric_bass violin=violin",
    "tool": "hammer=hammer+mallet_metal pliers=plyers saw=saw shovel=spade toolbox=toolbox "
    "wrench=wrench+wrench_plumbers brush=paintbrush_large",
    "vehicle": "truck=truck+garbagetruck tank=bradley+infantry-stryker+ww2_german_gun plane=747+f22_raptor "
    "bus=green_korean_bus tricycle=pink_tricycle balloon=balloon360 boat=walnutBoat+chineseJunk "
    "car=beetle+sedan+sportscar2 firetruck=firetruck",
    "plant": "flower=rose+daffodil+iris+marigold+anemone_red+bolsom+flower1+flower10+flower2+flower3+flower4+flower5"
    "+flower6+flower7+flower8+flower9+pigface+red-gazania+whitestar-petunia+yellow-flower+adeenia+anthoorium "
    "tree=holm_oak+tree336 palm=liberia-palm lavender=lavender",
    "ball": "basketball=basketball football=soccer",
    "": "frog=frog+frog-1 lizard=iguana slug=Brown_slug woodlouse=Woodlouse lobster=lobster "
    "shell=abalone+murray-mussel "
    "teddy=edward_bear doll=grannysmith binoculars=binoculars camera=camera_35mm bulb=Lightbulb jug=pitcher_small "
    "bin=wheelie_bin+home_compost_bin+garbagecan kettle=kettle toilet=toilet mixer=cementmixer candle=candle "
    "stethoscope=stethoscope syringe=syringe wreath=xmaswreath pie=Mince_Pie pudding=Christmas_pudding "
    "cane=Candy_cane_photo_1+Candy_cane_photo_2 gravestone=grave-a+grave-c+grave-d+grave-e+grave-f+grave-h+grave-i "
    "fireman=fireman200b+fireman240a parachute=paratrooper astronaut=spacewalk satellite=voyager2 "
    "moon=moon_full+moon_3qt+moon_crescent planet=5_jupiter+3_earth+2_venus+4_mars+6_saturn cone=traffic_cone "
    "wheel=wheel_tractor+7spoke256 trophy=trophy_cup key=key teapot=teapot mug=mug scissors=scissors_small_closed",
}
CUTOUTS: dict[str, list[str]] = {}  # name -> cut-outs
CATEGORY: dict[str, str] = {}  # name -> category, empty for things of no category that is asked about
for _category, _words in TABLE.items():
    for _entry in _words.split():
        _name, _stems = _entry.split("=")
        CUTOUTS[_name], CATEGORY[_name] = _stems.split("+"), _category
NAMES = list(CUTOUTS)
CATEGORIES = [category for category in TABLE if category]
PLURALS = {
    "goose": "geese", "mouse": "mice", "woodlouse": "woodlice", "cherry": "cherries", "strawberry": "strawberries",
    "fly": "flies", "trophy": "trophies", "fox": "foxes", "ostrich": "ostriches", "toolbox": "toolboxes",
    "bus": "buses", "brush": "brushes", "mantis": "mantises", "wrench": "wrenches",
    **{name: name for name in ("sheep", "deer", "bison", "fish", "clownfish", "lionfish", "butterflyfish", "broccoli",
                               "pliers", "grapes", "binoculars", "scissors")},
}  # fmt: skip
SIGNS = [
    "EXIT", "OPEN", "SALE", "TAXI", "STOP", "HOTEL", "CAFE", "BANK", "PARK", "FIRE", "BOOK", "FOOD", "FISH",
    "MILK", "GOLD", "BLUE", "KING", "LOVE", "HOME", "WORK", "POST", "TOWN", "ROAD", "NORTH", "SOUTH", "EAST",
    "WEST", "LEFT", "RIGHT", "FAST", "SLOW", "HIGH", "FREE", "PUSH", "PULL", "SHOP", "ZONE", "MAIN", "STAR",
    "MOON",
]  # fmt: skip
BACKGROUNDS = [
    "examples/alphamat/input_images/plant.jpg", "examples/data/aero1.jpg", "examples/data/aero3.jpg",
    "examples/data/aloeL.jpg", "examples/data/basketball1.png", "examples/data/blox.jpg",
    "examples/data/board.jpg", "examples/data/building.jpg", "examples/data/butterfly.jpg",
    "examples/data/ela_original.jpg", "examples/data/graf1.png", "examples/data/home.jpg",
    "examples/data/leuvenA.jpg", "examples/data/left.jpg", "examples/data/left01.jpg",
    "examples/data/right05.jpg", "examples/data/rubberwhale1.png", "examples/data/smarties.png",
    "examples/data/starry_night.jpg", "examples/data/stuff.jpg", "examples/hfs/data/001.jpg",
    "examples/text/scenetext05.jpg", "opencv4/html/HDRtoneMapping_memorialSample.jpg",
    "opencv4/html/Harris_Detector_Original_Image.jpg", "opencv4/html/Histogram_Calculation_Original_Image.jpg",
    "opencv4/html/fusion.png", "opencv4/html/fusion_mertens.jpg", "opencv4/html/feature_building.jpg",
    "opencv4/html/handSrc.jpg", "opencv4/html/space_shuttle.jpg", "opencv4/html/demo.jpg",
    "opencv4/html/Basic_Linear_Transform_Tutorial_gamma_correction.jpg", "opencv4/html/person_multi_det.jpg",
    "opencv4/html/detect_test2.jpg", "opencv4/html/gdal_output.jpg", "opencv4/html/gboriginal.png",
    "opencv4/html/diamondsaxis.jpg", "opencv4/html/faceDetection.png",
]  # fmt: skip


def held_out() -> set[str]:
    """A third of the cut-outs of each category, shown in one split of the evaluation alone.

    Second and later cut-outs of a name come first, so that most names stay known; the rest are the last names.
    """
    held: set[str] = set()
    for words in TABLE.values():
        groups = [entry.split("=")[1].split("+") for entry in words.split()]
        spare = [stem for group in groups for stem in reversed(group[1:])]
        alone = [group[0] for group in reversed(groups) if len(group) == 1]
        held.update((spare + alone)[: sum(len(group) for group in groups) // 3])
    return held


def plural(name: str) -> str:
    """The plural of a name or category."""
    return PLURALS.get(name, name + "s")


@functools.cache
def cutout(stem: str) -> Image.Image:
    """A cut-out as RGBA, cropped to what is seen, 336 pixels or less."""
    found = sorted((WORK / STAMPS).rglob(f"{stem}.png"), key=lambda path: ("seasonal" in path.parts, path))
    with Image.open(found[0]) as file:
        image = file.convert("RGBA")
    image = image.crop(image.getchannel("A").point(lambda value: 255 * (value > 16)).getbbox())
    image.thumbnail((336, 336))
    return image


@functools.cache
def background(place: str) -> Image.Image:
    """A photograph, its shorter side 448 pixels."""
    with Image.open(WORK / PICTURES / place) as file:
        image = file.convert("RGB")
    scale = 448 / min(image.size)
    return image.resize((max(448, round(image.width * scale)), max(448, round(image.height * scale))))
