mod arithmetic;
mod bits;
mod compare;

use crate::machine::Lanes;
use crate::testing::{Random, compare, pairs, refusal, registers};

const ONES: [u64; 65] = {
    let mut ones = [0; 65];
    let mut width = 1;
    while width <= 64 {
        ones[width] = u64::MAX >> (64 - width);
        width += 1;
    }
    ones
};

fn value(bits: u64, width: u32, signed: bool) -> i128 {
    let bits = bits & ONES[width as usize];
    if signed && bits >> (width - 1) & 1 == 1 {
        i128::from(bits) - (1i128 << width)
    } else {
        bits.into()
    }
}

/// Each type with its width, whether it is signed, and the letter of its registers.
const TYPES: [(&str, u32, bool, char); 6] = [
    ("u16", 16, false, 'h'),
    ("s16", 16, true, 'h'),
    ("u32", 32, false, 'r'),
    ("s32", 32, true, 'r'),
    ("u64", 64, false, 'd'),
    ("s64", 64, true, 'd'),
];

fn cases(width: u32) -> Vec<[u64; 2]> {
    let ones = ONES[width as usize];
    let edges = [
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        100,
        ones,
        ones - 1,
        ones >> 1,
        (ones >> 1) + 1,
        ones / 3,
        0x8001 & ones,
    ];
    let mut random = Random::new(width.into());
    let all = pairs(&edges, 600, &mut random);
    all.into_iter()
        .map(|pair| pair.map(|number| number & ones))
        .collect()
}

#[test]
fn forms_that_do_not_exist_are_refused() {
    for body in [
        "add.sat.u32 %r0, %r1, %r2;",
        "add.s32 %h0, %r1, %r2;",
        "add.s32 %r0, %r1;",
        "add.s32 %r0, %r1, %r2, %r3;",
        "add.hi.s32 %r0, %r1, %r2;",
        "mul.s32 %r0, %r1, %r2;",
        "mul.wide.u64 %d0, %d1, %d2;",
        "mad.cc.u32 %r0, %r1, %r2, %r3;",
        "and.u128 %r0, %r1, %r2;",
        "shf.l.b32 %r0, %r1, %r2, %r3;",
        "prmt.b32.b5e %r0, %r1, %r2, %r3;",
        "bfe.u16 %h0, %h1, 1, 2;",
        "max.relu %r0, %r1, %r2;",
        "max.relu.relu %r0, %r1, %r2;",
        "setp.s32 %p0, %r1, %r2;",
        "setp.eq.and.s32 %p0, %r1, %r2;",
        "setp.eq.s32 %r0, %r1, %r2;",
        "set.eq.s32 %r0, %r1, %r2;",
        "set.s32 %r0, %r1, %r2;",
        "slct.s32 %r0, %r1, %r2, %r3;",
        "selp.b32 %r0, %r1, %r2, %r3;",
        "dp4a.s32 %r0, %r1, %r2, %r3;",
        "add.s32 %r0, %r1, %p2;",
    ] {
        refusal(body);
    }
}
