"""MovieLens-1M by user, straight from `ml-1m.zip`: which of these movies does this person rate next?

Every rating is a positive, whatever its stars. Stored rows are two numbers; `Histories` looks the rest up, on the
device and a batch at a time. Models and metrics are not here.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import seeds
from ..errors import FedeveError
from ..seeds import Indices
from . import partition as ways
from .cache import Builder, Cache, cached, source_error
from .datasets import Arrays
from .files import FileDataset, Remote

Ints = NDArray[np.int32]

LAYOUT = 1  # of what is cached: raise it when that changes
HISTORY = 50
TRAIN_NEGATIVES, TEST_NEGATIVES = 4, 99
STARS = range(1, 6)
GENDERS = ("F", "M")
AGES = ("1", "18", "25", "35", "45", "50", "56")  # the first year of each age group
NUM_OCCUPATIONS = 21


@dataclass(frozen=True, kw_only=True)
class MovieLens1M(FileDataset):
    """1,000,209 ratings of 3,706 movies by 6,040 users, each a client; rank the last movie of each among 100.

    A user's ratings are sorted by time; equal times (more than half of them) keep the file's order. The last is the
    test positive, the others train, each with 4 negatives drawn anew and independently; the 99 of a test positive are
    distinct. Negatives are rated movies that are not the user's own, and depend on `seed` alone.
    """

    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote(
            "ml-1m.zip",
            "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
            size=5917549,
            sha256="a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
            md5="c4d9eecfca2ab87c1945afe126590906",
        ),
    )
    homepage: ClassVar[str] = "https://grouplens.org/datasets/movielens/1m/"
    source: ClassVar[str] = "ml-1m.zip of GroupLens"
    licence: ClassVar[str] = "research use with acknowledgement; no redistribution, no commercial use (GroupLens)"
    citation: ClassVar[str] = "Harper & Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition in ("dirichlet", "shards"):
            raise FedeveError(
                f"{self.name} cannot be dealt by label: its labels only say rated or not",
                got=self.partition,
                do="use natural (one client per user) or iid",
            )

    def arrays(self) -> Arrays:
        path = self.find("ml-1m.zip")
        made_of = {"layout": LAYOUT, "seed": self.seed}
        cache = cached(self.name, [path], lambda builder: _convert(path, builder, seed=self.seed), options=made_of)
        ratings = Ratings.of(cache)
        last = ratings.starts[1:] - 1
        trained = np.delete(np.arange(len(ratings.items)), last)
        x, y = _examples(ratings, trained, cache.arrays["negatives"])
        x_test, y_test = _examples(ratings, last, cache.arrays["negatives_test"])
        return Arrays(
            x=x,
            y=y,
            owners=np.repeat(ratings.owners[trained], 1 + TRAIN_NEGATIVES).astype(np.int64),
            x_test=x_test,
            y_test=y_test,
            num_classes=2,
            task="ranking",
            gather=Histories(ratings),
            source=f"{cache.checksum} {made_of} history {HISTORY}",
        )

    def _deal(self, arrays: Arrays) -> ways.Partition:
        if self.partition != "natural" or self.num_clients is not None:
            return super()._deal(arrays)
        # Rows lie user by user; a user with a single rating has none and is a client without data.
        num_users = len(arrays.y_test) // (1 + TEST_NEGATIVES)
        sizes = np.bincount(np.asarray(arrays.owners), minlength=num_users)
        return np.split(np.arange(len(arrays.y)), np.cumsum(sizes)[:-1])


@dataclass(frozen=True)
class Ratings:
    """What was rated: users and movies are numbered in the order of their ids, movies from 1."""

    items: Ints
    """[ratings] movies, user by user and by time; user u's are `items[starts[u]:starts[u + 1]]`."""
    starts: Ints
    features: Ints
    """[users, 4] gender, age group, occupation and zip code, each numbered from 0."""
    num_items: int
    num_zips: int

    @classmethod
    def of(cls, cache: Cache) -> Ratings:
        """The ratings in a cache."""
        arrays, notes = cache.arrays, cache.notes
        return cls(arrays["items"], arrays["starts"], arrays["features"], notes["movies"], notes["zips"])

    @property
    def owners(self) -> Ints:
        """[ratings] the user of each."""
        return np.repeat(np.arange(len(self.features), dtype=np.int32), np.diff(self.starts))


class Histories(nn.Module):
    """Looks up what a model sees of stored rows: (where the history ends, the candidate).

    A row's history is the up to 50 movies that its user rated before, padded with 0 on the left.
    """

    items: Tensor
    starts: Tensor
    owners: Tensor
    features: Tensor
    steps: Tensor

    def __init__(self, ratings: Ratings) -> None:
        super().__init__()
        self.cardinalities = (
            len(ratings.features),
            len(GENDERS),
            len(AGES),
            NUM_OCCUPATIONS,
            ratings.num_zips,
            ratings.num_items + 1,
        )
        for name in ("items", "starts", "owners", "features"):
            table = torch.from_numpy(np.array(getattr(ratings, name)))  # copied: a mapped file is read-only
            self.register_buffer(name, table, persistent=False)
        self.register_buffer("steps", torch.arange(-HISTORY, 0), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., 2] whole numbers -> [..., 6 + 50]: user, gender, age, occupation, zip, candidate, history."""
        ends, candidate = rows[..., :1].long(), rows[..., 1:].long()
        user = self.owners[ends].long()
        places = ends + self.steps
        history = torch.where(places >= self.starts[user], self.items[places.clamp(min=0)], 0)
        return torch.cat([user, self.features[user[..., 0]], candidate, history], dim=-1)


def negatives(ratings: Ratings, *, seed: int) -> tuple[Indices, Indices]:
    """Movies that are not the user's own: [training positives, 4], and [users, 99] without repetition."""
    num_users = len(ratings.features)
    own = np.zeros((num_users, ratings.num_items + 1), dtype=bool)
    own[ratings.owners, ratings.items] = True
    counts = np.diff(ratings.starts)
    if ratings.num_items - counts.max() < TEST_NEGATIVES:
        raise FedeveError(
            f"a user leaves fewer than {TEST_NEGATIVES} of {ratings.num_items} movies to draw negatives from",
            got=int(ratings.num_items - counts.max()),
            do="use the published ml-1m.zip",
        )
    users = np.repeat(np.arange(num_users), TRAIN_NEGATIVES * (counts - 1))
    rng = seeds.generator(seed, "movielens", "train negatives")
    train = _draw(rng, users, own, distinct=False)
    rng = seeds.generator(seed, "movielens", "test negatives")
    test = _draw(rng, np.repeat(np.arange(num_users), TEST_NEGATIVES), own, distinct=True)
    return train.reshape(-1, TRAIN_NEGATIVES), test.reshape(-1, TEST_NEGATIVES)


def _draw(rng: np.random.Generator, users: Indices, own: NDArray[np.bool_], *, distinct: bool) -> Indices:
    """[n] for each of `users` [n] an item that is not its `own` [users, items]; what is refused is drawn again."""
    num_items = own.shape[1]
    taken = (own.copy() if distinct else own).reshape(-1)
    drawn, missing = np.empty(len(users), dtype=np.int64), np.arange(len(users))
    while len(missing):
        pairs = users[missing] * num_items + rng.integers(1, num_items, len(missing))
        refused = taken[pairs]
        if distinct:
            repeated = np.ones(len(pairs), dtype=bool)
            repeated[np.unique(pairs, return_index=True)[1]] = False
            refused |= repeated
            taken[pairs] = True
        drawn[missing] = pairs % num_items
        missing = missing[refused]
    return drawn


def _examples(ratings: Ratings, places: Indices | Ints, rivals: NDArray[np.integer]) -> tuple[Ints, Indices]:
    """Rows [places * (1 + rivals), 2] and labels, at each place the movie rated there and then its rivals."""
    rows = np.empty((len(places), 1 + rivals.shape[1], 2), dtype=np.int32)
    rows[..., 0] = places[:, None]
    rows[:, 0, 1] = ratings.items[places]
    rows[:, 1:, 1] = rivals
    labels = np.zeros(rows.shape[:2], dtype=np.int64)
    labels[:, 0] = 1
    return rows.reshape(-1, 2), labels.reshape(-1)


def _convert(path: Path, builder: Builder, *, seed: int) -> None:
    """Put the archive's ratings and users, and negatives for them, into a cache."""
    texts = _read(path, "ml-1m/ratings.dat", "ml-1m/users.dat", "ml-1m/movies.dat")
    table = _rating_table(path, texts[0])
    user_ids, users = np.unique(table[:, 0], return_inverse=True)
    movie_ids, movies = np.unique(table[:, 1], return_inverse=True)
    pairs = users * len(movie_ids) + movies
    if len(np.unique(pairs)) < len(pairs):
        raise source_error(path, "has a user who rates a movie twice", len(pairs) - len(np.unique(pairs)))
    listed = {line[0] for line in _fields(path, "movies.dat", texts[2], 3)}
    for movie in movie_ids:
        if str(movie) not in listed:
            raise source_error(path, "has ratings of a movie that movies.dat does not list", int(movie))
    features, num_zips = _features(path, texts[1], user_ids)
    order = np.lexsort((table[:, 3], users))  # stable: equal times stay as they are in the file
    ratings = Ratings(
        items=(movies[order] + 1).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum(np.bincount(users))]).astype(np.int32),
        features=features,
        num_items=len(movie_ids),
        num_zips=num_zips,
    )
    train, test = negatives(ratings, seed=seed)
    for name in ("items", "starts", "features"):
        builder.put(name, getattr(ratings, name))
    smallest = np.min_scalar_type(ratings.num_items)
    builder.put("negatives", train.astype(smallest))
    builder.put("negatives_test", test.astype(smallest))
    stars = np.bincount(table[:, 2], minlength=STARS.stop)[STARS.start :].tolist()
    counts = {"ratings": len(table), "users": len(user_ids), "movies": len(movie_ids), "listed": len(listed)}
    builder.notes.update(counts, zips=num_zips, stars=stars)


def _read(path: Path, *members: str) -> list[bytes]:
    """These members of a zip, whole and with the right checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for name in names:
                # Nothing is unpacked here, but whoever unpacks such an archive writes where they did not mean to.
                plain = name.replace("\\", "/")
                if plain.startswith("/") or ":" in plain or ".." in PurePosixPath(plain).parts:
                    raise source_error(path, "has a member that points outside", name)
            for member in members:
                if member not in names:
                    raise source_error(path, f"has no {member}", names)
            return [archive.read(member) for member in members]
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise source_error(path, "cannot be read as a zip", str(error)) from error


_RATING = re.compile(rb"\d+::\d+::[1-5]::\d+\r?")


def _rating_table(path: Path, text: bytes) -> Indices:
    """[ratings, 4]: user, movie, stars, time."""
    only_numbers = not text.translate(None, b"0123456789:\r\n")
    if only_numbers and text.count(b":") == 2 * text.count(b"::") and text.strip():
        lines = io.TextIOWrapper(io.BytesIO(text.replace(b"::", b":")), encoding="latin-1")
        try:
            table = np.loadtxt(lines, dtype=np.int64, delimiter=":", comments=None, ndmin=2)
            if table.shape[1] == 4 and table[:, 2].min() >= STARS.start and table[:, 2].max() < STARS.stop:
                return table
        except ValueError:  # a field is missing or too long; found below
            pass
    for number, line in enumerate(text.splitlines(), start=1):
        if not _RATING.fullmatch(line):
            what = f"is malformed: ratings.dat, line {number} is no user::movie::1..5::time"
            raise source_error(path, what, line.decode("latin-1"))
    raise source_error(path, "is malformed: ratings.dat", f"{len(text)} bytes without a table of ratings")


def _fields(path: Path, name: str, text: bytes, count: int) -> list[list[str]]:
    lines = [line.decode("latin-1").split("::") for line in text.splitlines()]  # bytes: only \n and \r end a line
    for number, line in enumerate(lines, start=1):
        if len(line) != count:
            raise source_error(path, f"is malformed: {name}, line {number} has not {count} fields", "::".join(line))
    return lines


def _features(path: Path, text: bytes, user_ids: Indices) -> tuple[Ints, int]:
    """[users, 4] gender, age group, occupation and zip code of those who rate, and how many zip codes there are."""
    lines = _fields(path, "users.dat", text, 5)
    known = {line[0]: line[1:] for line in lines}
    if len(known) < len(lines):
        raise source_error(path, "has a user twice in users.dat", len(lines) - len(known))
    occupations = [str(number) for number in range(NUM_OCCUPATIONS)]
    mine = []
    for user in user_ids.tolist():
        if str(user) not in known:
            raise source_error(path, "has ratings by a user who is not in users.dat", user)
        gender, age, occupation, _ = known[str(user)]
        if gender not in GENDERS or age not in AGES or occupation not in occupations:
            raise source_error(path, f"is malformed: user {user} in users.dat", "::".join(known[str(user)]))
        mine.append(known[str(user)])
    zips = sorted({line[3] for line in mine})
    numbers = [{value: number for number, value in enumerate(values)} for values in (GENDERS, AGES, occupations, zips)]
    table = [[number[value] for number, value in zip(numbers, line, strict=True)] for line in mine]
    return np.array(table, dtype=np.int32), len(zips)
