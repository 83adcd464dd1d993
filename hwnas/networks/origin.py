"""The summary of a training, as a document."""

from __future__ import annotations

from hwnas.system.documents import Document

SUMMARY = Document("hwnas-training", 1, "the summary of a training", "Remove it to write it again, or choose another "
                   "out=FOLDER.")
