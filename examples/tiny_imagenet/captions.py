"""Captions for Tiny ImageNet: class names, their synonyms and several templates, some of each kept from training.

    python captions.py SOURCE OUT       # SOURCE: parquet files and classes.json; OUT: parquet files with `captions`
    python captions.py SOURCE OUT --classes 12 --each 50        # a few hundred images of classes that have descriptions

Every image of a class gets all training captions of its class, of which a training draws one at a time.
OUT/held_out.json has those that no training sees: two templates, the last name of classes that have three or more, and
descriptions that hold no class name at all, which is what people type.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATES = (
    "a photo of {}",
    "a picture of {}",
    "{}",
    "an image showing {}",
    "a close-up photo of {}",
    "a snapshot of {}",
)
HELD_OUT_TEMPLATES = ("a photograph that shows {}", "here you can see {}")
# no training caption, and no class name in them: what somebody might type
PARAPHRASES = {
    "goldfish": ("a small orange fish", "an orange fish in a bowl"),
    "black widow": ("a poisonous black spider with a red mark",),
    "tarantula": ("a big hairy spider",),
    "jellyfish": ("a transparent sea creature with tentacles",),
    "black stork": ("a tall dark bird with a long red beak",),
    "king penguin": ("a black and white bird that stands on the ice",),
    "koala": ("a grey furry animal that sleeps in eucalyptus trees",),
    "golden retriever": ("a friendly dog with long golden fur",),
    "German shepherd": ("a police dog",),
    "tabby": ("a striped pet cat",),
    "cougar": ("a mountain lion walking",),
    "lion": ("a big cat with a mane",),
    "brown bear": ("a large wild bear in the forest",),
    "ladybug": ("a small red beetle with black dots",),
    "bee": ("a striped insect that makes honey",),
    "monarch": ("an orange and black butterfly",),
    "African elephant": ("a huge grey animal with a trunk",),
    "hog": ("a pink farm animal in the mud",),
    "ox": ("cattle on a pasture",),
    "bison": ("a big shaggy animal of the prairie",),
    "orangutan": ("a red haired ape",),
    "school bus": ("a yellow vehicle that takes children to school",),
    "sports car": ("a fast red car on a road",),
    "freight car": ("a wagon of a cargo train",),
    "steel arch bridge": ("a metal bridge over a river",),
    "suspension bridge": ("a long bridge hanging on cables",),
    "fountain": ("water spraying up in a park",),
    "beacon": ("a white tower by the sea that warns ships",),
    "barn": ("a red wooden farm building",),
    "lakeside": ("the shore of a calm lake",),
    "seashore": ("waves on a sandy beach",),
    "alp": ("a snowy mountain peak",),
    "cliff": ("steep rocks above the sea",),
    "coral reef": ("colorful corals under water",),
    "pizza": ("a round italian dish with cheese and tomato",),
    "ice cream": ("a frozen dessert in a cone",),
    "espresso": ("a small cup of strong coffee",),
    "orange": ("a citrus fruit",),
    "lemon": ("a sour yellow fruit",),
    "banana": ("a long yellow fruit",),
    "mushroom": ("a toadstool in the woods",),
    "pop bottle": ("a bottle of lemonade",),
    "sunglasses": ("dark glasses against the sun",),
    "teddy": ("a stuffed toy bear",),
    "umbrella": ("something against the rain with a handle",),
    "sombrero": ("a wide mexican hat",),
    "military uniform": ("a soldier in dress clothes",),
    "candle": ("a wax light with a flame",),
    "drumstick": ("wooden sticks to hit a drum",),
    "computer keyboard": ("keys to type letters with",),
}


@dataclass(frozen=True)
class Line:
    """A caption, the class it stands for, and whether it is for training or of which kind that is not."""

    text: str
    label: int
    kind: str  # train, template, synonym or paraphrase


def lines_for(classes: Sequence[dict[str, Any]]) -> list[Line]:
    """All captions: first those for training, class by class, then the others."""
    found: list[Line] = []
    held: list[Line] = []
    for label, entry in enumerate(classes):
        names = [entry["name"], *entry["synonyms"]]
        known = names[:-1] if len(names) >= 3 else names

        def say(template: str, name: str, entry: dict[str, Any] = entry) -> str:
            return template.format(with_article(name, entry["caption"], entry["name"]))

        found += [Line(say(template, name), label, "train") for name in known for template in TEMPLATES]
        held += [Line(say(template, entry["name"]), label, "template") for template in HELD_OUT_TEMPLATES]
        held += [Line(say(TEMPLATES[0], name), label, "synonym") for name in names[len(known) :]]
        held += [Line(text, label, "paraphrase") for text in PARAPHRASES.get(entry["name"], ())]
    return found + held


def with_article(name: str, caption: str, usual: str) -> str:
    """`a goldfish`: with the article the data set's own caption has, if it has one for the usual name."""
    article = caption.removeprefix("a photo of ").removesuffix(usual).strip()
    if not article:
        return name
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def classes_of(source: Path) -> list[dict[str, Any]]:
    table = json.loads((source / "classes.json").read_text())
    return [table[str(label)] for label in range(len(table))]


def chosen_classes(classes: Sequence[dict[str, Any]], count: int | None) -> set[int]:
    """Labels of all classes, or of so many: those with descriptions first, which say whether free text works."""
    order = sorted(range(len(classes)), key=lambda label: classes[label]["name"] not in PARAPHRASES)
    return set(order[:count])


def main(source: Path, out: Path, count: int | None, each: int | None) -> None:
    """Write the parquet files anew, with all training captions of an image's class; or of `count` classes `each`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    classes = classes_of(source)
    chosen = chosen_classes(classes, count)
    lines = [line for line in lines_for(classes) if line.label in chosen]
    by_label: dict[int, list[str]] = {}
    for line in lines:
        if line.kind == "train":
            by_label.setdefault(line.label, []).append(line.text)
    # the names of the labels, where `atoll prepare` and Hugging Face's library look for them
    named = {"info": {"features": {"label": {"names": [entry["name"] for entry in classes], "_type": "ClassLabel"}}}}
    out.mkdir(parents=True, exist_ok=True)
    taken: Counter[int] = Counter()
    for file in sorted(source.glob("train-*.parquet")):
        table, kept = pq.read_table(file), []
        for row, label in enumerate(table["label"].to_pylist()):
            if label in chosen and (each is None or taken[label] < each):
                taken[label] += 1
                kept.append(row)
        if not kept:
            continue
        table = table.take(kept)
        captions = [by_label[label] for label in table["label"].to_pylist()]
        table = table.drop_columns(["caption"]).append_column("captions", pa.array(captions, pa.list_(pa.string())))
        pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(named)}), out / file.name)
    held = [{"caption": line.text, "label": line.label, "kind": line.kind} for line in lines if line.kind != "train"]
    (out / "held_out.json").write_text(json.dumps(held, indent=1) + "\n")  # last: the step is done when it is there
    print(
        f"{sum(taken.values()):,} images, {len(lines) - len(held)} captions for training, {len(held)} that no training "
        f"sees: {out}/held_out.json"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Captions for Tiny ImageNet")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--classes", type=int, help="take so many classes (default: all)")
    parser.add_argument("--each", type=int, help="take so many images of each (default: all)")
    asked = parser.parse_args()
    main(asked.source, asked.out, asked.classes, asked.each)
