"""Texts from two tokens to several hundred, on six topics."""

from __future__ import annotations

SEA = """
The tide had gone out further than anyone in the village could remember, and the mud
that it left behind was ribbed and shining like the roof of a dog's mouth. Children
walked out to the old wreck, which for once stood clear of the water, and put their
hands on the ribs of the hull. Their parents called them back. The fishermen, who knew
how quickly the channel fills when it does turn, had already pulled their boats up to
the harbour wall and were standing in a line, saying nothing, looking at the horizon.
Somebody's radio was giving the forecast for shipping: wind south-westerly, seven to
severe gale nine, sea state rough or very rough, rain later, visibility moderate. By
four in the afternoon the first long swell came in over the bar. It did not look like
much, a dark fold moving across grey water, but when it reached the shallows it rose,
and went on rising, and broke over the wreck with a noise that was felt in the ground
before it was heard. By five the mud was gone. By six the spray was coming over the
harbour wall and running down the main street, and every door on the sea side of it had
sandbags in front. The storm lasted all night. In the morning the beach had moved: the
shingle bank that had been to the north of the slipway for a hundred years now lay to
the south of it, and where it had been there was clean wet sand, and on the sand, quite
undamaged, an orange lifebelt with the name of a ship that nobody had ever heard of.
"""

BREAD = """
To make a plain loaf, mix five hundred grams of strong flour with ten of salt and three
of dried yeast, add three hundred and fifty of lukewarm water, and stir until no dry
flour is left. Cover the bowl and leave it for twenty minutes, so that the flour takes
up the water by itself. Then knead for ten minutes, or until the dough is smooth and
springs back when you press it. Let it rise until it has doubled, which takes an hour in
a warm kitchen and may take three in a cold one. Shape it, let it rise again in its tin,
and bake it for thirty-five minutes at two hundred and thirty degrees. It is done when
it sounds hollow if you knock on its underside. Wait until it is cool before cutting it.
"""

TEXTS: tuple[str, ...] = (
    "Rain",
    "It is raining.",
    "A storm is coming in from the sea tonight, with heavy rain and strong winds.",
    SEA,
    "How do I bake bread?",
    "The dough must rise twice before the loaf goes into the oven.",
    BREAD,
    "Stock markets fell",
    "Shares dropped sharply on Monday after the central bank raised interest rates.",
    "Investors sold equities and bought government bonds, because higher borrowing "
    "costs are expected to weigh on company profits in the coming quarters, and "
    "analysts warned that the decline on the exchanges may not be over.",
    "The striker scored twice in the final.",
    "Our team won the cup after a penalty shoot-out, and the fans sang in the streets "
    "until the early hours; the goalkeeper, who saved three penalties, was carried "
    "around the pitch on the shoulders of the other players.",
    "The telescope found water vapour in the atmosphere of a distant planet.",
    "Astronomers measured how starlight changes as an exoplanet passes in front of its "
    "star. Every molecule in the planet's air absorbs light of certain colours, so the "
    "spectrum shows what the air is made of. In this one they saw the lines of water, "
    "of carbon dioxide and of methane, and also a haze that hides the layers below.",
    "A compiler translates a program into machine code.",
    "Instead of interpreting the model one operation at a time, the software analyses "
    "the whole graph, fuses neighbouring operations into loops and generates native "
    "instructions for the processor ahead of the first run.",
)
