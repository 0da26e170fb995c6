use super::*;

/// Checks an instruction with two operands in each of the given types.
fn two(name: &str, only: &[&str], expected: impl Fn(i128, i128, u32) -> i128) {
    for (of, width, signed, letter) in TYPES {
        if !only.is_empty() && !only.contains(&of) {
            continue;
        }
        let name = name.replace('?', of);
        let [out, a, b] = [0, 1, 2].map(|number| format!("%{letter}{number}"));
        compare(
            &format!("{name} {out}, {a}, {b};"),
            [&a, &b],
            &out,
            cases(width),
            |[a, b]| {
                let [a, b] = [a, b].map(|number| value(number, width, signed));
                expected(a, b, width) as u64 & ONES[width as usize]
            },
        );
    }
}

/// Checks an instruction with three operands. The third operand is the sum of the first and twice the second.
fn three(name: &str, only: &[&str], expected: impl Fn([i128; 3], u32) -> i128) {
    for (of, width, signed, letter) in TYPES {
        if !only.is_empty() && !only.contains(&of) {
            continue;
        }
        let name = name.replace('?', of);
        let [out, a, b, c] = [0, 1, 2, 3].map(|number| format!("%{letter}{number}"));
        let ones = ONES[width as usize];
        let cases = cases(width);
        let cases = cases
            .into_iter()
            .map(|[a, b]| [a, b, b.wrapping_mul(2).wrapping_add(a) & ones]);
        compare(
            &format!("{name} {out}, {a}, {b}, {c};"),
            [&a, &b, &c],
            &out,
            cases,
            |all| expected(all.map(|number| value(number, width, signed)), width) as u64 & ones,
        );
    }
}

#[test]
fn sums_products_and_quotients() {
    two("add.?", &[], |a, b, _| a + b);
    two("sub.?", &[], |a, b, _| a - b);
    two("mul.lo.?", &[], |a, b, _| a.wrapping_mul(b));
    two(
        "mul.hi.?",
        &["u16", "s16", "u32", "s32", "s64"],
        |a, b, width| (a * b) >> width,
    );
    two("mul.hi.?", &["u64"], |a, b, _| {
        ((a as u128 * b as u128) >> 64) as i128
    });
    two("div.?", &[], |a, b, _| if b == 0 { -1 } else { a / b });
    two("rem.?", &[], |a, b, _| if b == 0 { -1 } else { a % b });
    two("min.?", &[], |a, b, _| a.min(b));
    two("max.?", &[], |a, b, _| a.max(b));
    two("min.relu.?", &["s32"], |a, b, _| a.min(b).max(0));
    two("max.?.relu", &["s32"], |a, b, _| a.max(b).max(0));
    let bound = |sum: i128| sum.clamp(i32::MIN.into(), i32::MAX.into());
    two("add.sat.?", &["s32"], |a, b, _| bound(a + b));
    two("sub.sat.?", &["s32"], |a, b, _| bound(a - b));
    three("mad.lo.?", &[], |[a, b, c], _| {
        a.wrapping_mul(b).wrapping_add(c)
    });
    three(
        "mad.hi.?",
        &["u16", "s16", "u32", "s32", "s64"],
        |[a, b, c], width| ((a * b) >> width) + c,
    );
    three("mad.hi.sat.?", &["s32"], |[a, b, c], _| {
        bound(((a * b) >> 32) + c)
    });
    three("sad.?", &[], |[a, b, c], _| (a - b).abs() + c);
    for (of, width, signed, letter) in TYPES {
        let body = format!("neg.{of} %{letter}0, %{letter}1; abs.{of} %{letter}2, %{letter}1;");
        let (a, ones) = (format!("%{letter}1"), ONES[width as usize]);
        let cases = || cases(width).into_iter().map(|[a, _]| [a]);
        compare(&body, [&a], &format!("%{letter}0"), cases(), |[a]| {
            a.wrapping_neg() & ones
        });
        compare(&body, [&a], &format!("%{letter}2"), cases(), |[a]| {
            value(a, width, signed).unsigned_abs() as u64 & ones
        });
    }
}

#[test]
fn products_of_twice_the_width() {
    for (of, width, signed, from, to) in [
        ("u16", 16, false, 'h', 'r'),
        ("s16", 16, true, 'h', 'r'),
        ("u32", 32, false, 'r', 'd'),
        ("s32", 32, true, 'r', 'd'),
    ] {
        let [out, a, b] = [format!("%{to}0"), format!("%{from}1"), format!("%{from}2")];
        let ones = ONES[2 * width as usize];
        let product = |a, b| value(a, width, signed) * value(b, width, signed);
        compare(
            &format!("mul.wide.{of} {out}, {a}, {b};"),
            [&a, &b],
            &out,
            cases(width),
            |[a, b]| product(a, b) as u64 & ones,
        );
        let c = format!("%{to}3");
        let more = cases(width)
            .into_iter()
            .map(|[a, b]| [a, b, !(a << width) & ones]);
        compare(
            &format!("mad.wide.{of} {out}, {a}, {b}, {c};"),
            [&a, &b, &c],
            &out,
            more,
            |[a, b, c]| (product(a, b) as u64).wrapping_add(c) & ones,
        );
    }
    let signed = |number: u64| i64::from((number as i32) << 8 >> 8);
    let names = ["%r1", "%r2"];
    compare(
        "mul24.lo.u32 %r0, %r1, %r2;",
        names,
        "%r0",
        cases(32),
        |[a, b]| ((a & 0xff_ffff) * (b & 0xff_ffff)) & 0xffff_ffff,
    );
    compare(
        "mul24.hi.s32 %r0, %r1, %r2;",
        names,
        "%r0",
        cases(32),
        |[a, b]| u64::from(((signed(a) * signed(b)) >> 16) as u32),
    );
    compare(
        "mad24.lo.s32 %r0, %r1, %r2, %r2;",
        names,
        "%r0",
        cases(32),
        |[a, b]| u64::from((signed(a) * signed(b)).wrapping_add(b as i64) as u32),
    );
    compare(
        "mad24.hi.sat.s32 %r0, %r1, %r2, %r2;",
        names,
        "%r0",
        cases(32),
        |[a, b]| {
            let product = ((signed(a) * signed(b)) >> 16) as i32;
            u64::from(
                (i64::from(product) + i64::from(b as i32)).clamp(i32::MIN.into(), i32::MAX.into())
                    as u32,
            )
        },
    );
}

#[test]
fn carries_go_from_word_to_word() {
    // 128 bits of two operands, as 64-bit words and as 32-bit words.
    let mut random = Random::new(5);
    let edges = [0, 1, u64::MAX, 1 << 63, 0xffff_ffff, 0xffff_ffff_0000_0000];
    let low = pairs(&edges, 300, &mut random);
    let cases: Vec<_> = low
        .iter()
        .enumerate()
        .map(|(at, [a, b])| [*a, edges[at % 6], *b, edges[at / 6 % 6]])
        .collect();
    let names = ["%d1", "%d2", "%d3", "%d4"];
    let number = |low: u64, high: u64| u128::from(high) << 64 | u128::from(low);
    let sum = |[a, b, c, d]: [u64; 4]| number(a, b).wrapping_add(number(c, d));
    let difference = |[a, b, c, d]: [u64; 4]| number(a, b).wrapping_sub(number(c, d));
    let body = "add.cc.u64 %d5, %d1, %d3; addc.u64 %d6, %d2, %d4;";
    compare(body, names, "%d6", cases.clone(), |all| {
        (sum(all) >> 64) as u64
    });
    compare(body, names, "%d5", cases.clone(), |all| sum(all) as u64);
    let body = "sub.cc.s64 %d5, %d1, %d3; subc.s64 %d6, %d2, %d4;";
    compare(body, names, "%d6", cases.clone(), |all| {
        (difference(all) >> 64) as u64
    });
    // Includes the carry out of the middle word.
    let split = "mov.b64 {%r1, %r2}, %d1; mov.b64 {%r3, %r4}, %d2; mov.b64 {%r5, %r6}, %d3; mov.b64 {%r7, %r8}, %d4;";
    let body = format!(
        "{split} add.cc.u32 %r1, %r1, %r5; addc.cc.u32 %r2, %r2, %r6; addc.cc.u32 %r3, %r3, %r7; addc.u32 %r4, %r4, %r8; mov.b64 %d6, {{%r3, %r4}};"
    );
    compare(&body, names, "%d6", cases.clone(), |all| {
        (sum(all) >> 64) as u64
    });
    let body = format!(
        "{split} sub.cc.u32 %r1, %r1, %r5; subc.cc.u32 %r2, %r2, %r6; subc.cc.u32 %r3, %r3, %r7; subc.u32 %r4, %r4, %r8; mov.b64 %d6, {{%r3, %r4}};"
    );
    compare(&body, names, "%d6", cases.clone(), |all| {
        (difference(all) >> 64) as u64
    });
    // 64 x 64 bits with 32-bit words, and 128 bits plus a product.
    let body = "mul.lo.u64 %d5, %d1, %d3; mad.lo.cc.u64 %d5, %d1, %d3, %d2; madc.hi.u64 %d6, %d1, %d3, %d4;";
    compare(body, names, "%d6", cases.clone(), |[a, b, c, d]| {
        let product = u128::from(a) * u128::from(c);
        (product.wrapping_add(number(b, d)) >> 64) as u64
    });
    let body = "mad.lo.cc.s32 %r0, %r1, %r2, %r3; madc.hi.s32 %r4, %r1, %r2, 0;";
    let cases = cases
        .into_iter()
        .map(|[a, b, c, _]| [a, b, c].map(|one| one & 0xffff_ffff));
    compare(body, ["%r1", "%r2", "%r3"], "%r4", cases, |[a, b, c]| {
        let product = i64::from(a as i32) * i64::from(b as i32);
        let carry = (u64::from(product as u32) + c) >> 32;
        ((product >> 32) as u64).wrapping_add(carry) & 0xffff_ffff
    });
}

#[test]
fn lanes_that_do_not_run_keep_their_carry_and_registers() {
    let body = "add.cc.u32 %r0, %r1, %r1; @%p0 add.cc.u32 %r0, %r2, 0; addc.u32 %r3, 0, 0;";
    let evaluate = registers(body, ["%r0", "%r3"]);
    let even: Lanes = std::array::from_fn(|lane| u64::from(lane % 2 == 0));
    let [sum, carry] = evaluate(&[
        ("%r1", &[0x8000_0001; 32]),
        ("%r2", &[9; 32]),
        ("%p0", &even),
    ]);
    for lane in 0..32 {
        let expected = if lane % 2 == 0 { (9, 0) } else { (2, 1) };
        assert_eq!((sum[lane], carry[lane]), expected, "lane {lane}");
    }
}

#[test]
fn dot_products_and_pairs() {
    let byte = |number: u64, at: u32, signed: bool| value(number >> (8 * at), 8, signed);
    let half = |number: u64, at: u32, signed: bool| value(number >> (16 * at), 16, signed);
    let cases: Vec<_> = cases(32)
        .into_iter()
        .map(|[a, b]| [a, b, !a])
        .map(|all| all.map(|one| one & ONES[32]))
        .collect();
    let names = ["%r1", "%r2", "%r3"];
    for (a_type, a_signed) in [("u32", false), ("s32", true)] {
        for (b_type, b_signed) in [("u32", false), ("s32", true)] {
            let body = format!("dp4a.{a_type}.{b_type} %r0, %r1, %r2, %r3;");
            compare(&body, names, "%r0", cases.clone(), |[a, b, c]| {
                let products = (0..4).map(|at| byte(a, at, a_signed) * byte(b, at, b_signed));
                (products.sum::<i128>() + i128::from(c)) as u64 & ONES[32]
            });
            for (which, first) in [("lo", 0), ("hi", 2)] {
                let body = format!("dp2a.{which}.{a_type}.{b_type} %r0, %r1, %r2, %r3;");
                compare(&body, names, "%r0", cases.clone(), |[a, b, c]| {
                    let products =
                        (0..2).map(|at| half(a, at, a_signed) * byte(b, first + at, b_signed));
                    (products.sum::<i128>() + i128::from(c)) as u64 & ONES[32]
                });
            }
        }
    }
    type Half = fn(i128, i128) -> i128;
    for (name, signed, expected) in [
        ("add.u16x2", false, (|a, b| a + b) as Half),
        ("add.s16x2", true, |a, b| a + b),
        ("sub.s16x2", true, |a, b| a - b),
        ("min.u16x2", false, |a, b| a.min(b)),
        ("max.u16x2", false, |a, b| a.max(b)),
        ("min.s16x2", true, |a, b| a.min(b)),
        ("max.s16x2", true, |a, b| a.max(b)),
        ("max.relu.s16x2", true, |a, b| a.max(b).max(0)),
        ("min.s16x2.relu", true, |a, b| a.min(b).max(0)),
    ] {
        let body = format!("{name} %r0, %r1, %r2;");
        let cases = cases.iter().map(|[a, b, _]| [*a, *b]);
        compare(&body, ["%r1", "%r2"], "%r0", cases, |[a, b]| {
            (0..2).fold(0, |all, at| {
                let result = expected(half(a, at, signed), half(b, at, signed));
                all | (result as u64 & 0xffff) << (16 * at)
            })
        });
    }
}
