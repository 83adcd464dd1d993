"""Data sets that are objects of Python: the same data in any form is the same data set, or one sentence."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import sparse

from hwnas.data.loading import load_dataset
from hwnas.data.objects import list_sources, store_objects
from hwnas.errors import DataError

N = 24
X = np.random.default_rng(0).integers(0, 256, (N, 12, 14, 3), np.uint8)
X[0, 0, 0, 0], X[0, 0, 0, 1] = 0, 255
Y = np.arange(N) % 3
NAMES = np.array(["ant", "bee", "cat"])
GREY = X[..., 0]


@pytest.fixture(autouse=True, scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWNAS_HOME", str(tmp_path_factory.mktemp("home")))
        yield


class Pairs(torch.utils.data.Dataset[Any]):
    """A data set of torch, whose items are made by a function of the row."""

    def __init__(self, item: Callable[[int], Any], classes: list[str] | None = None, count: int = N) -> None:
        self.item, self.count = item, count
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        if row >= self.count:
            raise IndexError(row)
        return self.item(row)


def chw(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.transpose(2, 0, 1).copy()) / 255


LABELS: dict[str, Callable[[np.ndarray], Any]] = {
    "list": lambda y: y.tolist(), "tuple": lambda y: tuple(y.tolist()), "column": lambda y: y[:, None],
    "row": lambda y: y[None], "list of lists": lambda y: y[:, None].tolist(), "uint8": lambda y: y.astype(np.uint8),
    "uint64": lambda y: y.astype(np.uint64), "big-endian": lambda y: y.astype(">i4"), "float": lambda y: y * 1.0,
    "object": lambda y: y.astype(object), "tensor": torch.from_numpy, "tensors": lambda y: [*torch.from_numpy(y)],
    "float tensor": lambda y: torch.from_numpy(y).float()[:, None], "scalars": lambda y: [*y],
    "needs grad": lambda y: torch.from_numpy(y * 1.0).requires_grad_(),
    "series": pd.Series, "shuffled index": lambda y: pd.Series(y, index=range(len(y))[::-1]),
    "Int64": lambda y: pd.Series(y, dtype="Int64"), "categorical": pd.Categorical,
    "category series": lambda y: pd.Series(y).astype("category"), "frame": lambda y: pd.DataFrame({"y": y}),
    "one-hot": lambda y: np.eye(y.max() + 1)[y], "one-hot bool": lambda y: np.eye(y.max() + 1)[y] == 1,
    "one-hot tensor": lambda y: torch.nn.functional.one_hot(torch.from_numpy(y)),
    "one-hot lists": lambda y: np.eye(y.max() + 1, dtype=int)[y].tolist(),
    "one-hot sparse": lambda y: sparse.csr_matrix(np.eye(y.max() + 1)[y]),
    "one-hot rows": lambda y: [*np.eye(y.max() + 1)[y]], "object of scalars": lambda y: as_objects([*y])}


@given(labels=st.lists(st.integers(0, 6), min_size=2, max_size=12), form=st.sampled_from(sorted(LABELS)))
@settings(deadline=None, max_examples=150)
def test_labels_in_any_form_are_the_same_data(labels: list[int], form: str) -> None:
    y = np.asarray(labels)
    if form.startswith("one-hot") and y.max() == 0:
        return  # rows of one column are a column of ones
    images = X[:len(y)]
    assert store_objects((images, LABELS[form](y))) == store_objects((images, y))


TEXT: dict[str, Callable[[np.ndarray], Any]] = {
    "list": lambda y: y.tolist(), "object": lambda y: y.astype(object), "bytes": lambda y: y.astype("S"),
    "series": pd.Series, "categorical": pd.Categorical, "column": lambda y: y[:, None],
    "reordered": lambda y: pd.Categorical(y, ["cat", "bee", "ant", "never"]), "dummies": pd.get_dummies,
    "StringDType": lambda y: y.astype(np.dtypes.StringDType())}


@pytest.mark.parametrize("form", TEXT)
def test_names_in_any_form_are_the_same_data(form: str) -> None:
    assert store_objects((X, TEXT[form](NAMES[Y]))) == store_objects((X, NAMES[Y]))


@pytest.mark.parametrize(("labels", "names"), [
    (Y + 1, "1 2 3"), (np.array([0, 5, 9])[Y], "0 5 9"), (Y == 1, "False True"), ((Y == 1).tolist(), "False True"),
    (np.where(Y == 1, 1, -1), "-1 1"), (np.array([9, 10, 100])[Y], "9 10 100"),
    (np.array(["b", "a", "c"])[Y], "a b c")])
def test_classes_are_the_labels_in_ascending_order(labels: Any, names: str) -> None:
    data = load((X, labels))
    assert data.class_names == tuple(names.split())
    for split in (data.train, data.validation, data.test):
        assert {*split.labels.tolist()} == {*range(len(data.class_names))}
    told = {image.tobytes(): data.class_names[label] for split in (data.train, data.validation, data.test)
            for image, label in zip(split.images, split.labels, strict=True)}
    plain = load((X, np.asarray(labels).astype(str)))
    assert told == {image.tobytes(): plain.class_names[label] for split in (plain.train, plain.validation, plain.test)
                    for image, label in zip(split.images, split.labels, strict=True)}


def load(data: Any) -> Any:
    return load_dataset({"name": "arrays", "root": str(store_objects(data))}, 12, 0)


IMAGES: dict[str, Callable[[], Any]] = {
    "channels first": lambda: X.transpose(0, 3, 1, 2), "floats": lambda: X / 255,
    "float32": lambda: X.astype("f4") / 255,
    "float16": lambda: (X / 255).astype(np.float16), "floats to 255": lambda: X.astype(np.float32), "int64": lambda:
    X.astype(np.int64), "list": lambda: [*X], "numbers": lambda: X.tolist(), "object": lambda: as_objects([*X]),
    "tensor": lambda: torch.stack([chw(image) for image in X]), "tensors": lambda: [chw(image) for image in X],
    "uint8 tensor": lambda: torch.from_numpy(X.transpose(0, 3, 1, 2)), "pictures": lambda:
    [Image.fromarray(image) for image in X], "fortran": lambda: np.asfortranarray(X), "view": lambda:
    np.concatenate([X, X])[:N], "big-endian": lambda: X.astype(">u2"), "files": lambda: [png(image) for image in X]}


def as_objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def png(image: np.ndarray) -> bytes:


    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("form", IMAGES)
def test_images_in_any_form_are_the_same_data(form: str) -> None:
    assert store_objects((IMAGES[form](), Y)) == store_objects((X, Y))


@pytest.mark.parametrize("grey", [GREY[..., None], GREY[:, None], GREY / 255, [*GREY], torch.from_numpy(GREY)[:, None],
                                  torch.from_numpy(GREY), [Image.fromarray(image) for image in GREY]])
def test_grey_images_in_any_form_are_the_same_data(grey: Any) -> None:
    assert store_objects((grey, Y)) == store_objects((GREY, Y))


def test_channels_may_come_first_with_alpha_too() -> None:
    clear = np.concatenate([X, X[..., :1]], 3)
    assert store_objects((clear.transpose(0, 3, 1, 2), Y)) == store_objects((clear, Y))


def hugging_face(parts: int = 1) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES.tolist())})
    rows = {"image": [Image.fromarray(image) for image in X], "label": Y}
    table = datasets.Dataset.from_dict(rows, features=features)
    return table if parts == 1 else datasets.DatasetDict({"train": table, "test": table.select(range(6))})


class Duck:
    """Looks like a data set of Hugging Face, and is none."""

    column_names = ("img", "target")

    def __len__(self) -> int:
        return N

    def __getitem__(self, name: str) -> list[Any]:
        return {"img": [Image.fromarray(image) for image in X], "target": NAMES[Y].tolist()}[name]


class Stream:
    """A data set of Hugging Face that is read from a server: its columns have names, and no length."""

    column_names = ("image", "label")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


SETS: dict[str, Callable[[], Any]] = {
    "pictures": lambda: Pairs(lambda row: (Image.fromarray(X[row]), int(Y[row])), NAMES.tolist()),
    "tensors": lambda: Pairs(lambda row: (chw(X[row]), torch.tensor(Y[row])), NAMES.tolist()),
    "blanks": lambda: Pairs(lambda row: (chw(X[row]), Y[row]), ["ant ", " bee", "cat"]),
    "subset": lambda: torch.utils.data.Subset(
        Pairs(lambda row: (chw(X[row]), Y[row]), [*NAMES.tolist(), "never"]), range(N)),
    "both": lambda: torch.utils.data.ConcatDataset([torch.utils.data.Subset(SETS["tensors"](), range(a, a + 12))
                                                   for a in (0, 12)]),
    "named": lambda: Pairs(lambda row: {"image": X[row], "label": NAMES[Y[row]]}),
    "items": lambda: [(image, name) for image, name in zip(X, NAMES[Y], strict=True)],
    "mapping": lambda: {"images": X, "labels": Y, "class_names": NAMES},
    "columns": lambda: {"image": X, "label": NAMES[Y]}, "named x": lambda: {"X": X, "y": NAMES[Y]},
    "columns of a part": lambda: {"train": {"X": X, "target": NAMES[Y]}},
    "train alone": lambda: {"train": (X, NAMES[Y])}, "list": lambda: [X, NAMES[Y]],
    "frame": lambda: pd.DataFrame({"image": [*X], "label": NAMES[Y]}),
    "hugging face": hugging_face, "duck": Duck,
    "other columns": lambda: hugging_face().rename_columns({"image": "img", "label": "what"})}


@pytest.mark.parametrize("form", SETS)
def test_data_sets_in_any_form_are_the_same_data(form: str) -> None:
    assert store_objects(SETS[form]()) == store_objects((X, NAMES[Y]))


PARTS: dict[str, Callable[[], Any]] = {
    "lists": lambda: [[X, Y], [X[:6], Y[:6]]], "mapping": lambda: {"train": (X, Y), "test": (X[:6], Y[:6])},
    "keras's file": lambda: {"x_train": X, "y_train": Y[:, None], "x_test": X[:6], "y_test": Y[:6, None]},
    "torch": lambda: (torch.utils.data.TensorDataset(torch.from_numpy(X.transpose(0, 3, 1, 2)), torch.from_numpy(Y)),
                      torch.utils.data.Subset(Pairs(lambda row: (X[row], Y[row])), range(6))),
    "column": lambda: pd.DataFrame({"image": [*X, *X[:6]], "label": [*Y, *Y[:6]],
                                    "split": ["train"] * N + ["Test"] * 6}),
    "a column of another name": lambda: pd.DataFrame({"image": [*X, *X[:6]], "label": [*Y, *Y[:6]],
                                                      "Usage": ["train"] * N + ["test"] * 6}),
    "one float": lambda: ((X, Y), (X[:6] / 255, Y[:6]))}


@pytest.mark.parametrize("form", PARTS)
def test_sets_held_apart_stay_apart(form: str) -> None:
    expected = store_objects(((X, Y), (X[:6], Y[:6])))
    assert store_objects(PARTS[form]()) == expected
    assert len(load(PARTS[form]()).test) == 6
    three = load(((X, Y), (X[:9], Y[:9]), (X[:6], Y[:6])))
    assert [len(split) for split in (three.train, three.validation, three.test)] == [24, 9, 6]


def test_a_column_called_split_divides_before_any_other() -> None:
    frame = PARTS["column"]().assign(set="train")
    assert store_objects(frame) == store_objects(((X, Y), (X[:6], Y[:6])))
    with pytest.raises(DataError, match="'is_valid' seems to divide"):
        store_objects(pd.DataFrame({"image": [*X], "label": [*Y], "is_valid": [False] * N}))


def test_hugging_face_parts_stay_apart() -> None:
    assert store_objects(hugging_face(2)) == store_objects(((X, NAMES[Y]), (X[:6], NAMES[Y[:6]])))


@pytest.mark.parametrize("relative", [False, True])
def test_a_frame_of_paths_is_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool) -> None:
    monkeypatch.chdir(tmp_path)
    for row, image in enumerate(X):
        Image.fromarray(image).save(tmp_path / f"{row}.png")
    paths = [f"{row}.png" if relative else tmp_path / f"{row}.png" for row in range(N)]
    for frame in (pd.DataFrame({"path": paths, "label": NAMES[Y]}), (paths, NAMES[Y]),
                  pd.DataFrame({"photo": paths, "label": NAMES[Y]}),
                  (np.asarray(list(map(str, paths))), NAMES[Y])):
        assert store_objects(frame) == store_objects((X, NAMES[Y]))
    (tmp_path / "3.png").unlink()
    with pytest.raises(DataError, match=r"image 3 of the train part: .*3\.png cannot be read"):
        store_objects((paths, Y))


def test_a_folder_of_torchvision_is_its_files(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    for row, image in enumerate(X):
        path = tmp_path / NAMES[Y[row]] / f"{row}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).resize((30, 20 + row)).save(path)
    folder = torchvision.datasets.ImageFolder(str(tmp_path))
    stored = store_objects(folder)
    assert stored == store_objects(([path for path, _ in folder.samples], NAMES[[at for _, at in folder.samples]]))


def test_a_picture_that_exif_turns_is_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    for row, image in enumerate(X):
        Image.fromarray(image).save(tmp_path / f"{row}.png", exif=exif)
    pictures = [Image.open(tmp_path / f"{row}.png") for row in range(N)]
    data = load_dataset({"name": "arrays", "root": str(store_objects((pictures, Y))), "upright": True}, 14, 0)
    stored = load_dataset({"name": "arrays", "root": str(store_objects((pictures, Y)))}, 14, 0)
    assert not np.array_equal(data.train.images, stored.train.images)


def test_files_are_kept_where_decoding_would_lose(tmp_path: Path) -> None:
    sizes = [(20 + row, 30) for row in range(N)]
    pictures = [Image.fromarray(X[row]).resize(size) for row, size in enumerate(sizes)]
    for row, picture in enumerate(pictures):
        (tmp_path / NAMES[Y[row]]).mkdir(exist_ok=True)
        picture.save(tmp_path / NAMES[Y[row]] / f"{row:02}.jpg")
    paths = [tmp_path / NAMES[Y[row]] / f"{row:02}.jpg" for row in range(N)]
    folder = load_dataset({"name": "imagefolder", "root": str(tmp_path)}, 12, 0)
    stored = load((paths, NAMES[Y]))
    pixels = [{image.tobytes() for image in data.train.images} for data in (folder, stored)]
    assert pixels[0] == pixels[1]
    torn = [png(image) for image in X[:-1]] + [png(X[-1])[:200]]
    with pytest.raises(DataError, match=r"train image 23: unreadable image .*truncated"):
        load((torn, Y))
    whole = load((pictures, NAMES[Y]))  # of different sizes, each kept without loss
    assert whole.train.images.shape == stored.train.images.shape


TO_CLASSIFY: dict[str, Callable[[list[str]], Any]] = {
    "paths": lambda paths: paths, "array of paths": np.asarray, "column of paths": pd.Series, "pattern": lambda paths:
    f"~/{Path(paths[0]).parent.name}/?.png", "array": lambda _: X[:3], "column": lambda _: pd.Series([*X[:3]]),
    "tensor": lambda _: torch.from_numpy(X[:3].transpose(0, 3, 1, 2)),
    "channels last": lambda _: torch.from_numpy(X[:3]), "tensors, channels last": lambda _: [*torch.from_numpy(X[:3])]}


@pytest.mark.parametrize("form", TO_CLASSIFY)
def test_images_to_classify_may_have_any_form(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for row in range(3):
        Image.fromarray(X[row]).save(tmp_path / f"{row}.png")
    sources = list_sources(TO_CLASSIFY[form]([str(tmp_path / f"{row}.png") for row in range(3)]))
    assert np.array_equal([np.asarray(source.open()) for source in sources], X[:3])
    with pytest.raises(DataError, match=r"cannot be read \(masked"):
        list_sources(np.ma.masked_array(X, X > 9))


def wrong(y: Any) -> tuple[Any, Any]:
    return X, y


@pytest.mark.parametrize(("data", "message"), [
    (wrong(Y[:-1]), r"shape \[23\], for 24 images"), (wrong(Y + 0.5), "0.5 .image 0. is no class"),
    (wrong(np.where(Y == 1, np.nan, Y)), "8 missing, the first of image 1"), (wrong([None, *Y[1:]]), "1 missing"),
    (wrong(["", *NAMES[Y[1:]]]), "1 missing"), (wrong([1, "a"] * 12), "are int and str"),
    (wrong(np.full((N, 3), 1 / 3)), "classes for image 0"), (wrong(np.tile([.2, .7, .1], (N, 1))), r"y\.argmax\(1\)"),
    (wrong(np.ones((N, 3))), "3 classes for image 0"), (wrong([[0], [1, 2]] * 12), "1 to 2 classes for an image"),
    (wrong(Y * 1j), "are complex128"), (wrong(3), r"shape \[\]"), (wrong([{}] * N), "are dict"),
    (wrong(np.where(Y == 1, -1, Y)), r"x\[y >= 0\]"), (wrong(np.array(["2020-01-01"] * N, "M8[D]")), "are datetime64"),
    (wrong(["cat", "cat ", "dog"] * 8), "'cat' and 'cat ' look the same"),
    (wrong(["caf\u00e9", "cafe\u0301"] * 12), "look the same, as only blanks or the Unicode form"),
    (((X, Y), (X, NAMES[Y])), "of different kinds"), (((X, NAMES[Y]), (X, Y + 7)), "of different kinds"),
    ((X.astype(float) / 127.5 - 1, Y), r"normalised already.*\(x \+ 1\) / 2"),
    (((X / 255 - .45) / .22, Y), r"x \* std \+ mean"), ((X.astype(np.uint16) * 16, Y), r"x / 4080 \* 255"),
    ((X / 255 * 16, Y), r"Write x / 16"), ((X // 128, Y), "nearly black"), ((X * 0, Y), "all alike"),
    (([(X[row, :9 + row % 2] // 128).astype(int) for row in range(N)], Y), r"nearly black\. Write x \* 255"),
    (((X, Y), (X // 128, Y)), "images of the test part have values from 0 to 1: nearly black"),
    ((X // 128 * 1.0 * np.nan, Y), "image 0 has NaN"), ((X.reshape(N, -1), Y), r"x\.reshape\(-1, "),
    ((X[:, :8, :8, 0].reshape(N, -1), Y), r"x\.reshape\(-1, 8, 8\)"), ((X * 1j, Y), "are complex128"),
    ((X[..., :2], Y), "which axis holds the channels"), ((X[:, :3, :, :], Y), "which axis"),
    ((Y, X), "Images come first"),
    ((X[:0], Y[:0]), r"shape \[0, 12, 14, 3\]"), (([], []), "there are none"), ((X, X, Y, Y), r"\(x_train, y_train\)"),
    ((), "data is empty"), (([X, X[:6]], [Y, Y[:6]]), r"\(x_test, y_test\)"), ({"trian": (X, Y)}, "train"),
    ({"test": (X, Y)}, "no images and labels"), ({"images": X}, "without train_labels"), (3, "data is an int"),
    (None, "data is a NoneType"), (dict, "data is a type"), (X, "data is a ndarray"),
    (torch.from_numpy(X), "data is a Tensor"),
    (((image, label) for image, label in zip(X, Y, strict=True)), r"data=\[\*data\]"),
    (torch.utils.data.DataLoader(Pairs(lambda row: (X[row], Y[row]))), r"data\.dataset"),
    (tuple(torch.utils.data.DataLoader(Pairs(lambda row: (X[row], Y[row]))) for _ in "ab"), r"data\.dataset"),
    (Stream(), r"a Stream, which has no length.*data=\[\*data\]"),
    (Pairs(lambda row: (Image.open(Path("nowhere.png")), 0)), "item 0 cannot be read .*nowhere"),
    ({"train": (X, Y), "dev": (X, Y)}, "no part called 'dev'"),
    ({"train": (X, Y), "val": (X, Y), "validation": (X, Y)}, "two names of one part"),
    ({"x_train": X, "train_images": X, "y_train": Y}, "another name of train_images"),
    (pd.DataFrame(np.zeros((9, 785), int)), "There are 0, 1, 2, 3, 4, 5, 6, 7, 8 and 776 more"),
    (Pairs(lambda row: (X[row], Y[row], row)), "item 0 is 3 values"),
    (Pairs(lambda row: X[row]), "item 0 is a ndarray"),
    (Pairs(lambda row: (chw(X[row]) - 0.5, Y[row])), "normalised already"),
    (Pairs(lambda row: (np.random.permutation(X[row]), Y[row])), "another each time"),
    (Pairs(lambda row: {"image": np.random.permutation(X[row]), "label": Y[row]}), "another each time"),
    (pd.DataFrame({"image": [*X], "label": [*Y], "is_training_image": [1] * N}), "seems to divide"),
    (pd.DataFrame({"path": ["a.png"], "label": [0], "target": [1]}), "which columns hold images and labels"),
    (pd.DataFrame({"a": ["a.png"], "b": [1]}), r"data\['IMAGE'\]"), ({"image": X}, "no part called 'image'"),
    (pd.DataFrame({"path": ["nowhere.png"], "label": [0]}), "nowhere.png cannot be read"),
    (pd.DataFrame({"path": [None], "label": [0]}), "image 0 of the train part is missing"),
    ((["nowhere.png"] * N, Y), "nowhere.png cannot be read"), (([object()] * N, Y), "is an object"),
    (([Image.open(io.BytesIO(png(X[0])[:200]))] * N, Y), "image 0 of the train part cannot be read .*truncated"),
    ((np.ma.masked_array(X, X > 9), Y), "masked")])
def test_what_cannot_be_meant_is_refused_in_one_sentence(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        store_objects(data)
    assert "\n" not in str(caught.value)


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot write .*HWNAS_HOME"):
        store_objects((X, Y))
