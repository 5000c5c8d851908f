"""Archives of MovieLens-1M in its exact format with a few made-up users, and its rows made the slow way."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from fedeve import FederatedData

Rating = tuple[int, int, int, int]
SIZES = {7: 130, 2: 3, 9: 1, 30: 60, 31: 51, 4: 2, 100: 52}  # ratings by user id, in the file's order
NUM_MOVIES = 260
PEOPLE = {7: "F::1::10::48067", 2: "M::56::16::70072", 9: "M::25::15::98107-1450", 30: "F::18::0::48067"}
PEOPLE |= {31: "M::35::20::02460", 4: "F::50::3::00000", 100: "M::45::1::55117", 55: "F::45::1::11111"}


def some_ratings() -> list[Rating]:
    """User, movie, stars, time: times have many ties, users and times are not sorted, ids have gaps."""
    rng = np.random.default_rng(1)
    ratings = []
    for user, count in SIZES.items():
        movies = 3 * rng.choice(np.arange(1, NUM_MOVIES + 1), count, replace=False)
        times = 956703932 + rng.integers(0, max(count // 3, 1), count)
        ratings += [(user, m, int(rng.integers(1, 6)), t) for m, t in zip(movies.tolist(), times.tolist(), strict=True)]
    ratings += [(7000, 3 * m, 5, 956703932) for m in range(1, 100)]  # so that nearly all movies are rated
    ratings += [(7001, 3 * m, 1, 956703932) for m in range(100, NUM_MOVIES + 1)]
    return [ratings[place] for place in rng.permutation(len(ratings))]


def texts(ratings: list[Rating] | None = None, people: dict[int, str] | None = None) -> dict[str, bytes]:
    """The members of an archive."""
    ratings = some_ratings() if ratings is None else ratings
    people = PEOPLE | {7000: "M::25::4::1", 7001: "F::25::4::2"} if people is None else people
    titles = [f"{m}::Caf\xe9 \x85 {m} (1995)::Animation|Children's|Comedy\n" for m in range(1, 3 * NUM_MOVIES + 1)]
    return {
        "ml-1m/movies.dat": "".join(titles).encode("latin-1"),
        "ml-1m/ratings.dat": "".join("::".join(map(str, rating)) + "\n" for rating in ratings).encode(),
        "ml-1m/README": b"SUMMARY\n",
        "ml-1m/users.dat": "".join(f"{user}::{rest}\n" for user, rest in people.items()).encode(),
    }


def write(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "ml-1m.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def sorted_ratings(text: bytes) -> dict[int, list[int]]:
    """Movie ids by user id, in the order of time, ties in the file's: built without the package."""
    by_user = defaultdict(list)
    for line in text.decode().splitlines():
        user, movie, _, when = map(int, line.split("::"))
        by_user[user].append((when, movie))
    return {user: [m for _, m in sorted(by_user[user], key=lambda pair: pair[0])] for user in sorted(by_user)}


class Slow:
    """What a row's features must be, in plain Python from an archive's text."""

    def __init__(self, members: dict[str, bytes]) -> None:
        self.by_user = sorted_ratings(members["ml-1m/ratings.dat"])
        self.users = list(self.by_user)
        self.ids = sorted({movie for rated in self.by_user.values() for movie in rated})
        self.number = {movie: place for place, movie in enumerate(self.ids, start=1)}
        lines = [line.split("::") for line in members["ml-1m/users.dat"].decode("latin-1").splitlines()]
        self.people = {int(line[0]): line[1:] for line in lines if int(line[0]) in self.by_user}
        self.zips = sorted({line[3] for line in self.people.values()})

    def features(self, user: int, place: int, candidate: int) -> list[int]:
        """Of the user numbered `user`, a candidate where its rating numbered `place` stands."""
        gender, age, occupation, code = self.people[self.users[user]]
        past = [self.number[m] for m in self.by_user[self.users[user]][max(place - 50, 0) : place]]
        ages = ["1", "18", "25", "35", "45", "50", "56"]
        known = [user, "FM".index(gender), ages.index(age), int(occupation), self.zips.index(code), candidate]
        return known + [0] * (50 - len(past)) + past

    def own(self, user: int) -> list[int]:
        return [self.number[m] for m in self.by_user[self.users[user]]]


def check_rows(data: FederatedData, slow: Slow, wanted: np.ndarray | None = None) -> None:
    """Every row, or the wanted ones, is what the slow construction says; candidates other than the positive are
    only checked not to be the user's own."""
    row = 0
    wanted_rows = None if wanted is None else set(wanted.tolist())
    for user in range(len(slow.users)):
        own = slow.own(user)
        for place in range(len(own) - 1):
            for rival in range(5):
                if wanted_rows is None or row in wanted_rows:
                    got = data.inputs(data.x[row]).tolist()
                    assert got == slow.features(user, place, got[5])
                    assert data.y[row] == (rival == 0)
                    assert (got[5] == own[place]) if rival == 0 else (1 <= got[5] <= len(slow.ids))
                    assert rival == 0 or got[5] not in own
                row += 1
    assert row == len(data.y)
