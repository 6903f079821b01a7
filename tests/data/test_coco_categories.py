"""COCO's categories as networks number them; where real files lie, they are the same."""

import json

from vispe.data.coco_categories import by_id, contiguous


def test_things_and_stuff():
    things, both = contiguous(stuff=False), contiguous(stuff=True)
    assert (len(things), len(both)) == (80, 133)
    assert both[:80] == things
    assert [category.id for category in both] == sorted({category.id for category in both})
    assert len({category.name for category in both}) == 133
    assert tuple(things[0]) == (1, "person", True)
    assert tuple(things[-1]) == (90, "toothbrush", True)
    assert tuple(both[-1]) == (200, "rug-merged", False)


def test_by_id():
    table = by_id()
    assert len(table) == 91
    assert all(category.id == k for k, category in enumerate(table))
    assert [k for k, category in enumerate(table) if not category.name] == [0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83]
    assert table[18].name == "dog"


def test_the_real_files_say_the_same(measured_data):
    """COCO's own table, where its annotations lie."""
    path = measured_data / "coco_tiny/annotations/panoptic_val2017.json"
    told = json.loads(path.read_text())["categories"]
    assert [(c["id"], c["name"], bool(c["isthing"])) for c in told] == [tuple(c) for c in contiguous(stuff=True)]
