"""The words that the text of `ced-tiny` is made of. Each becomes one token."""

from __future__ import annotations

FIRST_NAMES = tuple(
    """
    Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jon Kai Lea Max Nia Otto Pia Quin Rosa Sam Tess Uma Vic Wes Yara Zoe Abe
    Bea Cal Dot Eli Fay Gil Hal Ida Jack Kim Leo Mia Ned Ola Pat Ray Sue Ted Una Val Will Zed
    """.split()
)
LAST_NAMES = tuple(
    """
    Stone Hill Wood Lake Field Marsh Brook Ford Dale Moss Reed Thorn Frost Snow Storm Flint Vale Glen Holt Heath Shaw
    Crane Finch Drake Swan Hawk Wolf Lamb Hart Roe Birch Ash Elm Oak Pine Rowan Cole Gray Green Brown Black White
    King Page Cook Smith Baker Mason
    """.split()
)
JOBS = tuple(
    """
    pilot nurse farmer tailor doctor singer painter teacher sailor judge miner potter writer dancer lawyer driver
    barber butcher printer gardener porter banker fisher clerk
    """.split()
)
COLOURS = tuple("red blue green white black pink gold gray brown teal".split())
THINGS = tuple(
    """
    fox swan bear cat dog hen goat duck frog crab lion mouse cup hat bell drum lamp key ring coin shoe rope boat kite
    peach plum loaf cake nut pear leaf rose bed door chair clock book map pen box star moon coat cloud ship wheel
    """.split()
)
CITIES = tuple("Oslo Rome Paris Lima Cairo Delhi Tokyo Quito Bern Kiev Dublin Lagos".split())
VERBS = tuple("get find set buy sell send open close show count".split())
TEXT_PARAMETERS = ("city", "colour", "owner", "job")
NUMBER_PARAMETERS = ("day", "size", "price")
FILLER = tuple(
    """
    The wind is cold today.|It may rain soon.|The door is open.|The clock is slow.|We had plum cake.|The moon is
    up.|The road is long.|Some days are warm.|The cat is on the bed.|The boat is old.|They sell old books.|The
    lamp is out.
    """.replace("\n", " ")
    .strip()
    .split("|")
)
FILLER = tuple(" ".join(sentence.split()) for sentence in FILLER)
