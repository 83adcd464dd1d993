"""Mutations: a valid file made wrong, in bytes or in its structure. The same random numbers make the same file."""

from __future__ import annotations

import ast
import copy
import csv
import gzip
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]
MOST = 48 << 20  # bytes of the largest input
_NUMBERS = (b"NaN", b"1e999", b"-1e999", b"-1", b"0", b"1e-999", b"9" * 25, b"9" * 5000, b"-0.0", b"true", b'""',
            b"null", b"1e308", b"2147483648", b"9223372036854775808", b"0x7f", b".inf", b"1_0", b"12:30:45", b"[]",
            b"1.5", b"{}", b"3000000")
_INTEGERS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 10**25, 2**31, 2**63, -2**63, 1.5, float("nan"), float("inf"), -float("inf"), 1e308,
    5e-324, "", "x", "1", "nan", "../../x", "a\nb", "\0", "x" * 20_000, "ß\u2028🤖", "\ud800", [], {}, [[]], {"a": 1},
    [None], [0.0], {"": None}, "${oc.env:HOME}", "hwnas-front/1", 1_000_000, 3, 5, 16, 64, 0.5, [1, 2], [8, 16, 24],
    list(range(1, 65)), 4096)


def of_bytes(data: bytes, rng: Random) -> bytes:
    """Bits and bytes changed, pieces cut, doubled, moved, filled; whole numbers at their ends."""
    mutable = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        size = len(mutable)
        at, length = rng.randrange(size + 1), rng.choice((1, 2, 4, 8, 64, 1024))
        kind = rng.randrange(9)
        if kind == 0 and size:
            mutable[rng.randrange(size)] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            mutable[rng.randrange(size)] = rng.randrange(256)
        elif kind == 2:
            del mutable[at:at + length]
        elif kind == 3:
            del mutable[at:]
        elif kind == 4:
            mutable[at:at] = mutable[at:at + length] * rng.choice((1, 2, 100))
        elif kind == 5:
            mutable[at:at + length] = rng.randbytes(length)
        elif kind == 6:
            there = rng.randrange(size + 1)
            mutable[at:at + length] = mutable[there:there + length]
        elif kind == 7:
            number = struct.pack(rng.choice("<>") + "Q", rng.choice(_INTEGERS))
            width = rng.choice((1, 2, 4, 8))
            mutable[at:at + width] = number[:width] if rng.random() < 0.5 else number[-width:]
        else:
            mutable[at:at + length] = bytes([rng.choice((0, 255, 32, 10))]) * length
    return bytes(mutable[:MOST])


def of_text(data: bytes, rng: Random) -> bytes:
    """Numbers at their ends, brackets without end, a piece a million times, marks of YAML; else as `of_bytes`."""
    kind = rng.random()
    spots = [match.span() for match in re.finditer(rb"-?\d[\d.e+-]*", data)]
    if kind < 0.35 and spots:
        first, last = rng.choice(spots)
        other = slice(*rng.choice(spots))
        return data[:first] + (rng.choice(_NUMBERS) if rng.random() < 0.7 else data[other]) + data[last:]
    if kind < 0.45:
        first, last = rng.choice(spots) if spots and rng.random() < 0.8 else (rng.randrange(len(data) + 1),) * 2
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"- ", b""), (b"(", b")"), (b"{a: ", b"}")))
        deep = rng.choice((50, 500, 5_000, 200_000))
        return data[:first] + opening * deep + b"1" + closing * rng.choice((0, deep)) + data[last:]
    if kind < 0.46:
        at = rng.randrange(len(data) + 1)
        piece = rng.choice((data[at:at + rng.choice((1, 8, 200))], b"[],", b"{},", b'{"":0},', b"a,", b",", b"\n",
                            b"0,", b'"a":1,', b"- 1\n", b" ", b"a\n")) or b"\n"
        many = rng.choice((1000, 100_000, rng.choice((1 << 22, 12 << 20, MOST)) // len(piece)))
        return (data[:at] + piece * min(many, MOST // len(piece)) + data[at:])
    if kind < 0.56:
        mark = rng.choice((b"&a ", b"*a", b"!!python/object/apply:os.system ", b"!!timestamp ", b"!!binary ", b"!!set ",
                           b"<<: ", b"? ", b"|\n", b">\n", b"- ", b": ", b"#", b"%", b"@", b"`", b"\t", b"---\n",
                           b"!!int ", b"!!float ", b"2020-13-45", b"[*a,*a,*a,*a]", b"${", b"\xff\xfe", b"\xef\xbb\xbf",
                           b"\r", b'"', b"'", b"\0", b"=", b"~"))
        at = rng.choice(spots)[0] if spots and rng.random() < 0.5 else rng.randrange(len(data) + 1)
        return data[:at] + mark + data[at:]
    if kind < 0.66:
        lines = data.splitlines(keepends=True) or [b""]
        for _ in range(rng.choice((1, 3))):
            at, other = rng.randrange(len(lines)), rng.choice(lines)
            lines[at:at + rng.randrange(2)] = rng.choice(([other], [other], []))
            lines = lines or [b""]
        return b"".join(lines)
    return of_bytes(data, rng)


def changed(value: Any, rng: Random) -> Any:
    """A copy of plain values with one to four places in it of another type or size, doubled, renamed or gone."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(root, 4000))
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0 and holder is not root:
            del holder[key]
        elif kind == 1:
            other, name = rng.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif kind == 2:
            holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 50, str(holder[key])[:10_000]))
        elif kind == 3 and isinstance(holder, dict):
            holder[rng.choice(("", "x", "format", "version", str(key) + "_", *holder))] = holder.pop(key)
        elif kind == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = rng.choice((-holder[key], holder[key] * 10**6, holder[key] + 1, float(holder[key]), 0))
        elif kind == 5 and isinstance(holder[key], list) and holder[key]:
            holder[key] = rng.choice((holder[key] * 2, holder[key][1:], holder[key][::-1], holder[key] * 300))[:5000]
        elif kind == 6 and isinstance(holder, dict):
            holder[rng.choice(("x", "name", "seed", "threads", "_target_"))] = copy.deepcopy(rng.choice(_VALUES))
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return root[0]


def _places(value: Any, most: int) -> list[tuple[Any, Any]]:
    """Places of plain values, [(list or mapping, index or key)], the outermost first."""
    places, waiting = [], [value]
    while waiting and len(places) < most:
        holder = waiting.pop(0)
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        places += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return places


def of_json(data: bytes, rng: Random) -> bytes:
    """JSON changed in its structure, or as text."""
    if rng.random() < 0.3:
        return of_text(data, rng)
    return json.dumps(changed(json.loads(data), rng)).encode()


def of_yaml(data: bytes, rng: Random) -> bytes:
    """YAML changed in its structure, or as text."""
    import yaml

    if rng.random() < 0.5:
        return of_text(data, rng)
    values = changed(yaml.load(data, Loader=yaml.CSafeLoader), rng)
    return yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False).encode(errors="surrogateescape")


def of_csv(data: bytes, rng: Random) -> bytes:
    """A table with other cells, columns or lines, or changed as text."""
    if rng.random() < 0.4:
        return of_text(data, rng)
    lines = list(csv.reader(io.StringIO(data.decode())))
    for _ in range(rng.choice((1, 2, 8))):
        line, column = rng.randrange(len(lines)), rng.randrange(len(lines[0]))
        kind = rng.randrange(6)
        if kind == 0:
            for cells in lines:
                cells.pop(column) if len(cells) > max(1, column) else None
        elif kind == 1:
            for cells in lines:
                cells += cells[column:column + 1]
        elif kind == 2:
            lines.append(list(lines[line]))
        elif column < len(lines[line]):
            value = rng.choice((*_VALUES, "1e999", "-5", "9" * 5000, "true", "latency_ms price", "size_mb", "a b c"))
            lines[line][column] = value if isinstance(value, str) else json.dumps(value)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode(errors="surrogatepass")


def of_gzip(inner: Mutate) -> Mutate:
    """The content changed and packed again, or the packed bytes; now and then a bomb."""
    def mutate(data: bytes, rng: Random) -> bytes:
        kind = rng.random()
        if kind < 0.25:
            return of_bytes(data, rng)
        content = gzip.decompress(data)
        if kind < 0.27:
            content += rng.choice((b" ", b"\0", b"[],", b"1,")) * rng.choice((1 << 20, 40 << 20))
            packed = gzip.compress(content, 1)
            return packed * rng.choice((1, 1, 30))  # members of one file follow each other
        return gzip.compress(inner(content, rng), 1)
    return mutate


_DTYPES = ("|u1", "<f8", "<i8", "|O", "|V8", "<U5", "<U100000000", "|S0", "<c16", "|b1", "<M8[s]", ">u1",
           "|V2147483647")


def of_npy(data: bytes, rng: Random) -> bytes:
    """An array whose header lies about its type, order or shape, or changed bytes."""
    if rng.random() < 0.35 or data[:6] != b"\x93NUMPY":
        return of_bytes(data, rng)
    length, = struct.unpack("<H", data[8:10])
    header = ast.literal_eval(data[10:10 + length].decode("latin1"))
    kind, shape = rng.randrange(5), list(header["shape"])
    if kind <= 1:
        at = rng.randrange(len(shape) + 1)
        axis = rng.choice((*_INTEGERS, -1, 3, 2**62, True, 1e9, None))
        shape[at:at + rng.randrange(2)] = [axis] * rng.choice((1, 1, 40))
        header["shape"] = tuple(shape)
    elif kind == 2:
        header["descr"] = rng.choice((*_DTYPES, [("a", "|u1")], [("a", "|O")], None, 5, [["x"]]))
    elif kind == 3:
        header["fortran_order"] = rng.choice((True, 1, None))
    else:
        header[rng.choice(("shape", "descr", "x"))] = rng.choice(_VALUES)
    text = repr(header).encode("latin1", "replace")
    text = rng.choice((text, text, text, b"(" * 5000 + text, text + b" " * 60_000))[:65_000] + b"\n"
    return data[:8] + struct.pack("<H", len(text)) + text + data[10 + length:]


def of_zip(inner: Mutate) -> Mutate:
    """One member changed and packed again, members doubled or renamed, or changed bytes of the archive."""
    def mutate(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.4:
            return of_bytes(data, rng)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
        at = rng.randrange(len(members))
        name, content = members[at]
        kind = rng.random()
        if kind < 0.7:
            members[at] = name, inner(content, rng)
        elif kind < 0.85:
            members[at] = rng.choice(("../x.npy", "labels.npy", "images", "", "class_names.npy")), content
        elif kind < 0.87:
            members[at] = name, content + bytes(rng.choice((1 << 20, MOST)))
        else:
            members += [(f"m{number}.npy", content) for number in range(rng.choice((1, 300)))]
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, content in dict(members).items():
                archive.writestr(name or "x", content)
        return out.getvalue()
    return mutate


def of_safetensors(data: bytes, rng: Random) -> bytes:
    """A header that lies about types, shapes and places, or changed bytes."""
    if rng.random() < 0.35:
        return of_bytes(data, rng)
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    about = header.get("__metadata__", {})
    keys = [key for key in about if about[key][:1] in "{["]
    if keys and rng.random() < 0.5:
        key = rng.choice(keys)
        about[key] = of_json(about[key].encode(), rng)[:1 << 21].decode(errors="replace")
    else:
        header = changed(header, rng)
        for entry in header.values() if isinstance(header, dict) and rng.random() < 0.3 else ():
            if isinstance(entry, dict) and "dtype" in entry:
                entry["dtype"] = rng.choice(("F64", "BOOL", "BF16", "F8_E4M3", "I64", "U8", "F4", "x"))
    text = json.dumps(header).encode()
    size = rng.choice((len(text), len(text), len(text), len(text) + 1, 2**40, 2**63, 90 << 20))
    return struct.pack("<Q", size) + text + data[8 + length:]


def of_png(data: bytes, rng: Random) -> bytes:
    """Chunks changed, doubled, dropped and blown up, with sums that agree; else changed bytes."""
    if rng.random() < 0.3 or data[:8] != b"\x89PNG\r\n\x1a\n":
        return of_bytes(data, rng)
    chunks, at = [], 8
    while at + 12 <= len(data):
        length, = struct.unpack(">I", data[at:at + 4])
        chunks.append((data[at + 4:at + 8], data[at + 8:at + 8 + length]))
        at += 12 + length
    at = rng.randrange(len(chunks))
    kind = rng.random()
    if kind < 0.35:
        header = bytearray(chunks[0][1])
        header[0:8] = struct.pack(">II", *(rng.choice((1, 3, 9000, 60_000, 2**31 - 1, 0)) for _ in range(2)))
        header[8:13] = bytes(rng.choice((header[place], rng.randrange(17))) for place in range(8, 13))
        chunks[0] = chunks[0][0], bytes(header)
    elif kind < 0.7:
        chunks[at] = chunks[at][0], of_bytes(chunks[at][1], rng)
    elif kind < 0.8:
        chunks.insert(at, rng.choice(chunks))
    elif kind < 0.88:
        chunks[at] = rng.choice((b"tEXt", b"PLTE", b"fcTL", b"tRNS", b"eXIf", b"acTL", b"fdAT", b"IEND")), chunks[at][1]
    else:
        packed = zlib.compress(bytes(rng.choice((1000, 60 << 20))), 1)
        chunks.insert(1, rng.choice(((b"zTXt", b"a\0\0" + packed), (b"iCCP", b"a\0\0" + packed),
                                     (b"iTXt", b"a\0\1\0\0\0" + packed))))
    return data[:8] + b"".join(struct.pack(">I", len(content)) + name + content
                               + struct.pack(">I", zlib.crc32(name + content)) for name, content in chunks)


def of_onnx(data: bytes, rng: Random) -> bytes:
    """Fields of the protocol buffer changed, doubled, moved or removed; else changed bytes."""
    import onnx
    from google.protobuf.descriptor import FieldDescriptor as Field

    if rng.random() < 0.3:
        return of_bytes(data, rng)
    proto = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        messages, waiting = [], [proto]
        while waiting and len(messages) < 3000:
            message = waiting.pop(0)
            messages.append(message)
            for field, value in message.ListFields():
                if field.type == Field.TYPE_MESSAGE:
                    waiting += list(value) if field.is_repeated else [value]
        message = rng.choice(messages)
        if not (chosen := message.DESCRIPTOR.fields):
            continue
        field = rng.choice(chosen)
        value = getattr(message, field.name)
        many = field.is_repeated
        kinds = {Field.TYPE_STRING: ("", "x", "../../x", "y" * 5000, "input"),
                 Field.TYPE_BYTES: (b"", b"\0" * 7, b"x" * 4096),
                 Field.TYPE_FLOAT: (float("nan"), float("inf"), 0.0, -1.0), Field.TYPE_DOUBLE: (float("nan"), 0.0)}
        new = kinds.get(field.type, (-1, 0, 1, 3, 99, 2**20, 2**31 - 1, 2**40, 2**62, -(2**63)))
        try:
            if field.type == Field.TYPE_MESSAGE:
                peers = [other for other in messages if other.DESCRIPTOR is field.message_type]
                if many and len(value) and rng.random() < 0.4:
                    del value[rng.randrange(len(value))]
                elif many:
                    value.add().MergeFromString(rng.choice(peers).SerializeToString() if peers else b"")
                elif peers:
                    value.MergeFromString(rng.choice(peers).SerializeToString())
                else:
                    value.SetInParent()
            elif many:
                if len(value) and rng.random() < 0.6:
                    value[rng.randrange(len(value))] = rng.choice(new)
                else:
                    value.extend([rng.choice(new)] * rng.choice((1, 1, 70)))
            elif rng.random() < 0.2:
                message.ClearField(field.name)
            else:
                setattr(message, field.name, rng.choice(new))
        except (ValueError, TypeError, AttributeError):  # a number that the field cannot hold
            continue
    if rng.random() < 0.01:  # a graph in a graph in a graph
        for _ in range(rng.choice((20, 150))):
            inner = copy.deepcopy(proto.graph)
            del proto.graph.node[1:]
            attribute = proto.graph.node.add(op_type="If").attribute.add(name="then_branch", type=5)
            attribute.g.CopyFrom(inner)
    try:
        return bytes(proto.SerializeToString()[:MOST])
    except Exception:  # protobuf's own error where a message is nested too deep to be written
        return data
