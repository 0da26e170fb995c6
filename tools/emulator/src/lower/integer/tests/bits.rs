use super::*;

#[test]
fn logic_and_shifts() {
    for (of, width, letter) in [("b16", 16, 'h'), ("b32", 32, 'r'), ("b64", 64, 'd')] {
        let ones = ONES[width];
        let [out, a, b] = [0, 1, 2].map(|number| format!("%{letter}{number}"));
        let check = |name: &str, expected: &dyn Fn(u64, u64) -> u64| {
            let body = format!("{name}.{of} {out}, {a}, {b};");
            compare(&body, [&a, &b], &out, cases(width as u32), |[a, b]| {
                expected(a, b) & ones
            });
        };
        check("and", &|a, b| a & b);
        check("or", &|a, b| a | b);
        check("xor", &|a, b| a ^ b);
        let one = |name: &str, expected: &dyn Fn(u64) -> u64| {
            let body = format!("{name}.{of} {out}, {a};");
            let cases = cases(width as u32).into_iter().map(|[a, _]| [a]);
            compare(&body, [&a], &out, cases, |[a]| expected(a) & ones);
        };
        one("not", &|a| !a);
        one("cnot", &|a| u64::from(a == 0));
    }
    for (of, width, signed, letter) in TYPES {
        let [out, a] = [0, 1].map(|number| format!("%{letter}{number}"));
        let ones = ONES[width as usize];
        let numbers = cases(width).into_iter().enumerate();
        let amounts = [
            0,
            1,
            5,
            15,
            16,
            17,
            31,
            32,
            33,
            63,
            64,
            65,
            200,
            u64::from(u32::MAX),
        ];
        let cases: Vec<_> = numbers
            .map(|(at, [a, _])| [a, amounts[at % amounts.len()]])
            .collect();
        let body = format!("shr.{of} {out}, {a}, %r9;");
        compare(&body, [&a, "%r9"], &out, cases.clone(), |[a, by]| {
            (value(a, width, signed) >> by.min(100)) as u64 & ones
        });
        let body = format!("shl.b{width} {out}, {a}, %r9;");
        compare(&body, [&a, "%r9"], &out, cases, |[a, by]| {
            (u128::from(a) << by.min(64)) as u64 & ones
        });
    }
}

#[test]
fn funnel_shifts() {
    let mut random = Random::new(6);
    let amounts = [0, 1, 8, 31, 32, 33, 40, 64, u64::from(u32::MAX)];
    let cases: Vec<_> = (0..400)
        .map(|at| {
            [
                random.next() & ONES[32],
                random.next() & ONES[32],
                amounts[at % amounts.len()],
            ]
        })
        .collect();
    let names = ["%r1", "%r2", "%r3"];
    for (mode, amount) in [
        ("wrap", (|by| by % 32) as fn(u64) -> u64),
        ("clamp", |by| by.min(32)),
    ] {
        compare(
            &format!("shf.l.{mode}.b32 %r0, %r1, %r2, %r3;"),
            names,
            "%r0",
            cases.clone(),
            |[low, high, by]| {
                let both = u128::from(high) << 32 | u128::from(low);
                (both << amount(by) >> 32) as u64 & ONES[32]
            },
        );
        compare(
            &format!("shf.r.{mode}.b32 %r0, %r1, %r2, %r3;"),
            names,
            "%r0",
            cases.clone(),
            |[low, high, by]| {
                let both = u128::from(high) << 32 | u128::from(low);
                (both >> amount(by)) as u64 & ONES[32]
            },
        );
    }
}

#[test]
fn every_table_of_three_bits() {
    for table in 0..256u64 {
        let body = format!("lop3.b32 %r0, %r1, %r2, %r3, {table};");
        let mut random = Random::new(table);
        let cases: Vec<_> = (0..4)
            .map(|_| [0; 3].map(|_: u64| random.next() & ONES[32]))
            .collect();
        compare(&body, ["%r1", "%r2", "%r3"], "%r0", cases, |[a, b, c]| {
            (0..32).fold(0, |all, bit| {
                let row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1;
                all | (table >> row & 1) << bit
            })
        });
    }
}

#[test]
fn counts_of_bits() {
    for (width, a) in [(32u32, "%r1"), (64, "%d1")] {
        let cases = || {
            let single = (0..width).map(|bit| [1u64 << bit]);
            let all = cases(width).into_iter().map(|[a, _]| [a]);
            single.chain(all)
        };
        let bit = move |a: u64, at: u32| a >> at & 1;
        let name = |name: &str| format!("{name} %r0, {a};");
        compare(
            &name(&format!("popc.b{width}")),
            [a],
            "%r0",
            cases(),
            |[a]| (0..width).map(|at| bit(a, at)).sum(),
        );
        compare(
            &name(&format!("clz.b{width}")),
            [a],
            "%r0",
            cases(),
            |[a]| (0..width).rev().take_while(|at| bit(a, *at) == 0).count() as u64,
        );
        let find = move |a: u64, signed: bool| {
            let sign = if signed { bit(a, width - 1) } else { 0 };
            (0..width).rev().find(|at| bit(a, *at) != sign)
        };
        for (letter, signed) in [("u", false), ("s", true)] {
            compare(
                &name(&format!("bfind.{letter}{width}")),
                [a],
                "%r0",
                cases(),
                |[a]| find(a, signed).map_or(ONES[32], u64::from),
            );
            compare(
                &name(&format!("bfind.shiftamt.{letter}{width}")),
                [a],
                "%r0",
                cases(),
                |[a]| find(a, signed).map_or(ONES[32], |at| u64::from(width - 1 - at)),
            );
        }
        let out = a.replace('1', "0");
        compare(
            &format!("brev.b{width} {out}, {a};"),
            [a],
            &out,
            cases(),
            |[a]| (0..width).fold(0, |all, at| all | bit(a, at) << (width - 1 - at)),
        );
    }
}

#[test]
fn fields_of_bits() {
    let places = [0, 1, 7, 8, 31, 32, 33, 63, 64, 100, 255, 256 + 4];
    for (width, letter) in [(32u32, 'r'), (64, 'd')] {
        let ones = ONES[width as usize];
        let mut random = Random::new(7);
        let mut cases = Vec::new();
        for start in places {
            for length in places {
                cases.extend(
                    (0..3).map(|_| [random.next() & ones, start, length, random.next() & ones]),
                );
            }
        }
        let [out, a, b] = [0, 1, 2].map(|number| format!("%{letter}{number}"));
        let names = [a.as_str(), "%r8", "%r9", b.as_str()];
        // The reference works bit by bit, as the manual does.
        let bit = |number: u64, at: u64| number >> at & 1;
        for (sign, signed) in [("u", false), ("s", true)] {
            let body = format!("bfe.{sign}{width} {out}, {a}, %r8, %r9;");
            compare(
                &body,
                names,
                &out,
                cases.clone(),
                |[a, start, length, _]| {
                    let (start, length, most) = (start & 255, length & 255, u64::from(width - 1));
                    let sign = if signed && length > 0 {
                        bit(a, (start + length - 1).min(most))
                    } else {
                        0
                    };
                    (0..=most).fold(0, |all, at| {
                        let inside = at < length && start + at <= most;
                        all | if inside { bit(a, start + at) } else { sign } << at
                    })
                },
            );
        }
        let body = format!("bfi.b{width} {out}, {a}, {b}, %r8, %r9;");
        compare(&body, names, &out, cases, |[a, start, length, b]| {
            let (start, length) = (start & 255, length & 255);
            (0..length)
                .filter(|at| start + at < u64::from(width))
                .fold(b, |all, at| {
                    all & !(1 << (start + at)) | bit(a, at) << (start + at)
                })
        });
    }
    let cases = || cases(32).into_iter();
    compare(
        "bmsk.clamp.b32 %r0, %r1, %r2;",
        ["%r1", "%r2"],
        "%r0",
        cases(),
        |[start, length]| {
            let (start, length) = (start.min(32), length.min(32));
            (((1u128 << length) - 1) << start) as u64 & ONES[32]
        },
    );
    compare(
        "szext.wrap.s32 %r0, %r1, %r2;",
        ["%r1", "%r2"],
        "%r0",
        cases(),
        |[a, length]| match length % 32 {
            0 => 0,
            length => value(a, length as u32, true) as u64 & ONES[32],
        },
    );
}

#[test]
fn permuted_bytes() {
    let [a, b] = [0x8322_1100u64, 0x77f6_5544];
    let bytes: [u64; 8] =
        std::array::from_fn(|at| (if at < 4 { a } else { b }) >> (8 * (at % 4)) & 0xff);
    let names = ["%r1", "%r2", "%r3"];
    let mut random = Random::new(8);
    let cases: Vec<_> = (0..500).map(|_| [a, b, random.next() & ONES[32]]).collect();
    compare(
        "prmt.b32 %r0, %r1, %r2, %r3;",
        names,
        "%r0",
        cases,
        |[_, _, choice]| {
            (0..4).fold(0, |all, place| {
                let one = choice >> (4 * place) & 15;
                let byte = bytes[(one & 7) as usize];
                let byte = if one & 8 == 0 {
                    byte
                } else {
                    0xff * (byte >> 7)
                };
                all | byte << (8 * place)
            })
        },
    );
    // The highest byte is first, as in the manual's tables.
    for (mode, rows) in [
        (
            "f4e",
            [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]],
        ),
        (
            "b4e",
            [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]],
        ),
        ("rc8", [[0; 4], [1; 4], [2; 4], [3; 4]]),
        (
            "ecl",
            [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]],
        ),
        (
            "ecr",
            [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]],
        ),
        (
            "rc16",
            [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]],
        ),
    ] {
        let body = format!("prmt.b32.{mode} %r0, %r1, %r2, %r3;");
        let cases = (0..4).map(|choice| [a, b, choice + 0xf0]);
        compare(&body, names, "%r0", cases, |[_, _, choice]| {
            let row: [usize; 4] = rows[(choice & 3) as usize];
            row.into_iter().fold(0, |all, byte| all << 8 | bytes[byte])
        });
    }
}
