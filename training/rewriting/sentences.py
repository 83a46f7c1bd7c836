"""Sentences of travellers in English, German and French, made from patterns; one in eight is held out of training."""

from __future__ import annotations

from random import Random
from zlib import crc32

LANGUAGES = ("en", "de", "fr")
# Each row says the same in the order of LANGUAGES.
HOURS = (
    ("at one o'clock", "um ein Uhr", "à une heure"), ("at two o'clock", "um zwei Uhr", "à deux heures"),
    ("at three o'clock", "um drei Uhr", "à trois heures"), ("at four o'clock", "um vier Uhr", "à quatre heures"),
    ("at six o'clock", "um sechs Uhr", "à six heures"), ("at seven o'clock", "um sieben Uhr", "à sept heures"),
    ("at nine o'clock", "um neun Uhr", "à neuf heures"), ("at ten o'clock", "um zehn Uhr", "à dix heures"),
)  # fmt: skip
DAYS = (
    ("on Monday", "am Montag", "lundi"),
    ("on Tuesday", "am Dienstag", "mardi"), ("on Friday", "am Freitag", "vendredi"),
    ("on Saturday", "am Samstag", "samedi"), ("on Sunday", "am Sonntag", "dimanche"), ("today", "heute", "aujourd'hui"),
    ("tomorrow", "morgen", "demain"),
)  # fmt: skip
GOING = (
    ("The train", "Der Zug", "Le train"), ("The bus", "Der Bus", "Le bus"), ("The boat", "Das Schiff", "Le bateau"),
    ("The tram", "Die Straßenbahn", "Le tramway"),
)  # fmt: skip
TOWNS = (
    ("to Berlin", "nach Berlin", "pour Berlin"), ("to Paris", "nach Paris", "pour Paris"),
    ("to London", "nach London", "pour Londres"), ("to Vienna", "nach Wien", "pour Vienne"),
    ("to Geneva", "nach Genf", "pour Genève"), ("to Cologne", "nach Köln", "pour Cologne"),
    ("to Brussels", "nach Brüssel", "pour Bruxelles"),
)  # fmt: skip
PLACES = (
    ("the station", "der Bahnhof", "la gare"),
    ("the hotel", "das Hotel", "l'hôtel"), ("the bank", "die Bank", "la banque"),
    ("the market", "der Markt", "le marché"), ("the museum", "das Museum", "le musée"),
    ("the library", "die Bibliothek", "la bibliothèque"), ("the church", "die Kirche", "l'église"),
    ("the harbour", "der Hafen", "le port"),
)  # fmt: skip
WHERE = (
    ("behind the bridge", "hinter der Brücke", "derrière le pont"),
    ("next to the park", "neben dem Park", "à côté du parc"),
    ("on the left", "links", "à gauche"),
    ("on the right", "rechts", "à droite"), ("near here", "hier in der Nähe", "près d'ici"),
    ("in the old town", "in der Altstadt", "dans la vieille ville"),
)  # fmt: skip
WANTED = (
    ("a ticket", "eine Fahrkarte", "un billet"), ("two tickets", "zwei Fahrkarten", "deux billets"),
    ("a room", "ein Zimmer", "une chambre"), ("a coffee", "einen Kaffee", "un café"),
    ("a glass of water", "ein Glas Wasser", "un verre d'eau"), ("a map", "einen Stadtplan", "un plan de la ville"),
    ("the bill", "die Rechnung", "l'addition"), ("some bread", "etwas Brot", "un peu de pain"),
)  # fmt: skip
WHO = (
    ("my brother", "mein Bruder", "mon frère"), ("my sister", "meine Schwester", "ma sœur"),
    ("our neighbour", "unser Nachbar", "notre voisin"), ("the teacher", "die Lehrerin", "la professeure"),
    ("my friend", "mein Freund", "mon ami"), ("the doctor", "der Arzt", "le médecin"),
)  # fmt: skip
DOES = (
    ("buys {w}", "kauft {w}", "achète {w}"), ("would like {w}", "möchte {w}", "voudrait {w}"),
    ("is looking for {w}", "sucht {w}", "cherche {w}"), ("needs {w}", "braucht {w}", "a besoin de {w}"),
)  # fmt: skip
PATTERNS = (
    ("{g} {t} leaves {h}.", "{g} {t} fährt {h} ab.", "{g} {t} part {h}."),
    ("{g} {t} does not leave {d}.", "{g} {t} fährt {d} nicht.", "{g} {t} ne part pas {d}."),
    ("{g} {t} leaves {d} {h}.", "{g} {t} fährt {d} {h} ab.", "{g} {t} part {d} {h}."),
    ("Excuse me, where is {p}?", "Entschuldigung, wo ist {p}?", "Excusez-moi, où est {p} ?"),
    ("{p} is {x}.", "{p} ist {x}.", "{p} est {x}."),
    ("Is {p} {x}?", "Ist {p} {x}?", "Est-ce que {p} est {x} ?"),
    ("I would like {w}, please.", "Ich möchte bitte {w}.", "Je voudrais {w}, s'il vous plaît."),
    ("Where can I find {w}?", "Wo finde ich {w}?", "Où puis-je trouver {w} ?"),
    ("{a} {v} {d}.", "{a} {v} {d}.", "{a} {v} {d}."),
    ("{a} arrives {d} {h}.", "{a} kommt {d} {h} an.", "{a} arrive {d} {h}."),
    ("We met {d} {h}.", "Wir haben uns {d} {h} getroffen.", "Nous nous sommes rencontrés {d} {h}."),
    ("{d} {a} is not here.", "{d} ist {a} nicht hier.", "{d}, {a} n'est pas ici."),
)
# What French needs after "besoin de".
_PARTED = {"de le ": "du ", "de un ": "d'un ", "de une ": "d'une "}
SLOTS = {"g": GOING, "t": TOWNS, "h": HOURS, "d": DAYS, "p": PLACES, "x": WHERE, "w": WANTED, "a": WHO, "v": DOES}


def is_held_out(english: str) -> bool:
    return crc32(english.encode()) % 8 == 0


def make(rng: Random, *, held_out: bool) -> tuple[str, ...]:
    """One sentence in each of ``LANGUAGES``."""
    while True:
        pattern = rng.choice(PATTERNS)
        picked = {name: rng.choice(rows) for name, rows in SLOTS.items()}
        said = tuple(
            _written(pattern[i], {name: row[i] for name, row in picked.items()}) for i in range(len(LANGUAGES))
        )
        if is_held_out(said[0]) == held_out:
            return said


def _written(pattern: str, words: dict[str, str]) -> str:
    words["v"] = words["v"].format(w=words["w"])
    text = pattern.format(**words)
    for apart, joined in _PARTED.items():
        text = text.replace(f"besoin {apart}", f"besoin {joined}")
    return text[0].upper() + text[1:]
