"""Small tables with the headers, kinds of values and relations of published ones.

What guess is tested on: which column is the label, what is known only with it, and what is an id.
Values are random; relations are those of the published tables, such as that a flight which departs
late mostly arrives late.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path

Row = dict[str, object]


def write_table(
    path: Path, make: Callable[[random.Random, int], Row], rows: int, delimiter: str = ","
) -> Path:
    """Write rows with a header."""
    rng = random.Random(1)
    made = [make(rng, i) for i in range(rows)]
    lines = [delimiter.join(made[0])]
    lines += [delimiter.join(str(value) for value in row.values()) for row in made]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def german_credit(rng: random.Random, i: int) -> Row:
    """A status of four texts first, the label 0/1 last; the duration is that of the loan."""
    good = rng.random() < 0.7
    return {
        "status": rng.choice(["no checking account", "... < 0 DM", "0<= ... < 200 DM", ">= 200"]),
        "duration": round(rng.gauss(20 if good else 25, 11)) % 72 + 4,
        "credit_history": rng.choice(["all paid", "delay in past", "critical", "existing"]),
        "purpose": rng.choice(["car (new)", "furniture", "radio", "business", "education"]),
        "amount": rng.randint(250, 18_424),
        "savings": rng.choice(["< 100 DM", "100 - 500 DM", "unknown"]),
        "age": rng.randint(19, 75),
        "telephone": rng.choice(["yes", "no"]),
        "foreign_worker": rng.choice(["yes", "yes", "yes", "no"]),
        "credit_risk": int(good),
    }


def loans(rng: random.Random, i: int) -> Row:
    """A status of texts, and a last column of 0 and 1 whose name says nothing."""
    return {
        "status": rng.choice(["own", "rent", "mortgage"]),
        "amount": rng.randint(500, 9000),
        "purpose": rng.choice(["car", "house", "travel"]),
        "Creditability": rng.choice([0, 1, 1]),
    }


def labelled_ratings(rng: random.Random, i: int) -> Row:
    """MovieLens joined with its users, the rating called label."""
    user = rng.randint(1, 300)
    return {
        "user": user,
        "item": rng.randint(1, 500),
        "label": rng.choice([1, 2, 3, 3, 4, 4, 5]),
        "age": 18 + user % 50,
        "sex": "MF"[user % 2],
        "zip": f"z{user % 90}",
    }


def feedback(rng: random.Random, i: int) -> Row:
    """Ratings up to 10 by another name."""
    return {"reader": rng.choice("abcdefgh"), "book": rng.choice("uvwxyz"),
            "Feedback": rng.randint(1, 10)}  # fmt: skip


def shop_events(rng: random.Random, i: int) -> Row:
    """A log of a shop in which each row is an event of some kind."""
    kind = rng.choice(["view"] * 9 + ["cart", "remove_from_cart", "purchase"])
    return {
        "event_time": datetime(2024, 1, 1) + timedelta(minutes=i),
        "event_type": kind,
        "product_id": rng.randint(1, 400),
        "brand": rng.choice(["acer", "apple", "asus"]),
        "user_id": rng.randint(1, 90),
    }


def hotel_bookings(rng: random.Random, i: int) -> Row:
    """Its status is the label in other words, and has a date; agents are numbers."""
    canceled = rng.random() < 0.37
    arrival = date(2016, 1, 1) + timedelta(days=rng.randint(0, 500))
    lead = rng.randint(0, 200)
    earlier = timedelta(days=rng.randint(0, lead))
    return {
        "hotel": rng.choice(["City Hotel", "Resort Hotel"]),
        "is_canceled": int(canceled),
        "lead_time": lead,
        "arrival_date_year": arrival.year,
        "arrival_date_month": f"{arrival:%B}",
        "previous_cancellations": rng.choice([0, 0, 0, 1, 2]),
        "agent": rng.choice(["NULL", *range(1, 300, 7)]),
        "company": rng.choice(["NULL", "NULL", *range(6, 500, 11)]),
        "adr": f"{rng.uniform(30, 300):.2f}",
        "reservation_status": "Canceled" if canceled else "Check-Out",
        "reservation_status_date": arrival - earlier if canceled else arrival + timedelta(days=3),
    }


def airlines(rng: random.Random, i: int) -> Row:
    """Delays at departure are the label; those at arrival follow, and cancelled flights."""
    late = round(rng.gauss(5, 25))
    arrival = late + round(rng.gauss(2, 14))
    return {
        "Year": rng.randint(1987, 2008),
        "DayOfWeek": rng.randint(1, 7),
        "CRSDepTime": rng.randint(5, 23) * 100,
        "UniqueCarrier": rng.choice(["PS", "TW", "UA", "WN"]),
        "FlightNum": rng.randint(1, 900),
        "ArrDelay": arrival,
        "DepDelay": late,
        "Origin": rng.choice(["SAN", "SFO", "BUR", "OAK"]),
        "Distance": rng.randint(100, 2000),
        "Cancelled": int(rng.random() < 0.03),
        "IsArrDelayed": "YES" if arrival > 0 else "NO",
        "IsDepDelayed": "YES" if late > 0 else "NO",
    }


def bank_marketing(rng: random.Random, i: int) -> Row:
    """Calls that end in a sale last longer."""
    sold = rng.random() < 0.12
    return {
        "age": rng.randint(18, 90),
        "job": rng.choice(["admin.", "services", "retired"]),
        "default": rng.choice(["no", "no", "no", "yes"]),
        "month": rng.choice(["may", "jun", "nov"]),
        "duration": int(rng.lognormvariate(6.2 if sold else 5.1, 0.7)),
        "campaign": rng.randint(1, 9),
        "poutcome": rng.choice(["unknown", "failure", "success"]),
        "y": "yes" if sold else "no",
    }


def orders(rng: random.Random, i: int) -> Row:
    """Times of a shop's orders: they are delivered after the purchase."""
    bought = datetime(2018, 1, 1) + timedelta(minutes=13 * i)
    return {
        "customer_id": rng.randint(1, 200),
        "seller_id": rng.randint(1, 60),
        "release_date": date(2017, 1, 1) + timedelta(days=rng.randint(0, 300)),
        "delivered_at": bought + timedelta(hours=rng.randint(20, 400)),
        "purchase_timestamp": bought,
        "price": f"{rng.uniform(5, 99):.2f}",
        "returned": int(rng.random() < 0.2),
    }


def recbole(rng: random.Random, i: int) -> Row:
    """ml-100k as RecBole writes it, joined with what is known of users and items."""
    user = rng.randint(1, 200)
    return {
        "user_id:token": user,
        "item_id:token": rng.randint(1, 100),
        "rating:float": rng.randint(1, 5),
        "timestamp:float": f"{874_724_710 + 700 * i}.0",
        "age:token": 18 + user % 40,
        "zip_code:token": f"{user * 7919 % 99_999:05d}",
        "price:float": rng.randint(1, 90),
        "class:token_seq": rng.choice(["Comedy", "Drama War", "War Comedy Drama"]),
        "vector:float_seq": "0.5 0.25",
    }


def integer_ids(rng: random.Random, i: int) -> Row:
    """Users and items as integers, and nothing else."""
    return {
        "uid": rng.randint(1, 300),
        "iid": rng.randint(1, 500),
        "rating": rng.randint(1, 5),
        "ts": 1_600_000_000 + 60 * i,
    }
