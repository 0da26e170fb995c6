use std::collections::HashMap;

use crate::lower::lower;
use crate::machine::{Action, Source};
use crate::memory::{LOCAL, SHARED};
use crate::ptx::parse;
use crate::testing::{compare, refusal, registers, run_on};

#[test]
fn registers_and_numbers() {
    let case = [[0xfedc_ba98_7654_3210]];
    compare("mov.u64 %d0, %d1;", ["%d1"], "%d0", case, |[a]| a);
    compare("mov.b32 %f0, %r1;", ["%r1"], "%f0", case, |[_]| 0x7654_3210);
    compare("mov.f32 %f0, 0f40490FDB;", ["%r1"], "%f0", case, |_| {
        0x4049_0fdb
    });
    compare(
        "mov.f64 %d0, 0d400921FB54442D18;",
        ["%r1"],
        "%d0",
        case,
        |_| 0x4009_21fb_5444_2d18,
    );
    compare("mov.f64 %d0, -1.5;", ["%r1"], "%d0", case, |_| {
        (-1.5f64).to_bits()
    });
    compare("mov.u16 %h0, -1;", ["%r1"], "%h0", case, |_| 0xffff);
    compare("mov.b32 %r0, -2;", ["%r1"], "%r0", case, |_| 0xffff_fffe);
    compare(
        "mov.u64 %d0, 0xFFFFFFFFFFFFFFFF;",
        ["%r1"],
        "%d0",
        case,
        |_| u64::MAX,
    );
    let [lane, first, warp] = registers(
        "mov.u32 %r0, %laneid; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;",
        ["%r0", "%r1", "%r2"],
    )(&[]);
    assert_eq!(lane, std::array::from_fn(|lane| lane as u64));
    assert_eq!((first[9], warp[9]), (0, 32));
    for body in [
        "mov.u32 %r0, %p1;",
        "mov.b32 %h0, %r1;",
        "mov.u32 %r0, %nothing;",
        "mov.u32 %r0, nothing;",
        "mov.v2.u32 %r0, %r1;",
        "mov.u32 %r0;",
    ] {
        refusal(body);
    }
}

#[test]
fn lanes_that_do_not_run_keep_their_registers() {
    let evaluate = registers(
        "mov.u32 %r0, 1; @%p0 mov.u32 %r0, %r1; @!%p0 mov.b64 {%r2, %r3}, %d1;",
        ["%r0", "%r2"],
    );
    let odd = std::array::from_fn(|lane| lane as u64 & 1);
    let [set, half] = evaluate(&[
        ("%p0", &odd),
        ("%r1", &[7; 32]),
        ("%r2", &[8; 32]),
        ("%d1", &[9; 32]),
    ]);
    for lane in 0..32 {
        let expected = if lane % 2 == 1 { (7, 8) } else { (1, 9) };
        assert_eq!((set[lane], half[lane]), expected, "lane {lane}");
    }
}

#[test]
fn parts() {
    let case = || [[0x8877_6655_4433_2211]];
    let both = |body: &str, input: &str, output: &str, expected: u64| {
        compare(body, [input], output, case(), |_| expected);
    };
    both("mov.b32 {%h0, %h1}, %r1;", "%r1", "%h0", 0x2211);
    both("mov.b32 {%h0, %h1}, %r1;", "%r1", "%h1", 0x4433);
    both("mov.b32 {_, %h1}, %r1;", "%r1", "%h1", 0x4433);
    both("mov.b64 {%r0, %r1}, %d1;", "%d1", "%r1", 0x8877_6655);
    both("mov.b64 {%h0, %h1, %h2, %h3}, %d1;", "%d1", "%h2", 0x6655);
    both("mov.b32 {%h0, %h1, %h2, %h3}, %r1;", "%r1", "%h3", 0x44);
    both("mov.b16 {%h0, %h1}, %h2;", "%h2", "%h1", 0x22);
    // The destination includes the register that is read.
    both(
        "mov.b64 {%r1, %r2}, %d1; mov.b64 %d1, {%r2, %r1};",
        "%d1",
        "%d1",
        0x4433_2211_8877_6655,
    );
    both(
        "mov.b32 {%h0, %h1}, %r1; mov.b32 %r0, {%h1, %h0};",
        "%r1",
        "%r0",
        0x2211_4433,
    );
    both(
        "mov.b64 %d0, {%h1, %h1, %h2, 7};",
        "%h1",
        "%d0",
        0x0007_ffff_2211_2211,
    );
    both("mov.b32 %r0, {%h1, -1};", "%h1", "%r0", 0xffff_2211);
    both(
        "mov.b64 %d0, {%f1, 0f3F800000};",
        "%f1",
        "%d0",
        0x3f80_0000_4433_2211,
    );
    both(
        "{ .reg .b8 a, b; mov.b16 {a, b}, %h1; mov.b32 %r0, {a, b, a, 5}; }",
        "%h1",
        "%r0",
        0x0511_2211,
    );
    // 128 bits.
    both(
        "mov.b128 %q0, {%d1, %d2}; mov.b128 %q1, %q0; mov.b128 {%d3, %d0}, %q1;",
        "%d1",
        "%d3",
        0x8877_6655_4433_2211,
    );
    both(
        "mov.b128 %q0, {%d2, %d1}; mov.b128 %q1, %q0; mov.b128 {%d3, %d0}, %q1;",
        "%d1",
        "%d0",
        0x8877_6655_4433_2211,
    );
    both(
        "mov.b64 {%r1, %r2}, %d1; mov.b128 %q0, {%r1, %r1, %r1, %r2}; mov.b128 {%d3, %d0}, %q0;",
        "%d1",
        "%d0",
        0x8877_6655_4433_2211,
    );
    both(
        "mov.b128 %q0, {%d2, %d1}; mov.b128 {%r0, %r1, %r2, %r3}, %q0;",
        "%d1",
        "%r2",
        0x4433_2211,
    );
    for body in [
        "mov.b32 {%h0, %h1, %h2}, %r1;",
        "mov.b64 {%h0, %h1}, %d1;",
        "mov.b32 %d0, {%h0};",
        "mov.b128 %q0, %d1;",
        "mov.u32 {%h0, %h1}, %r1;",
    ] {
        refusal(body);
    }
}

/// Checks the results of `mov` and `cvta` for variables.
#[test]
fn variables_have_addresses_in_their_space_and_everywhere() {
    let text = ".version 8.8\n.target sm_90a\n.global .align 8 .b8 table[64];\n.shared .align 16 .b8 first[32];\n.shared .align 16 .b8 tile[64];\n\
        .entry k() {\n.reg .b64 %d<9>;\n.local .align 8 .b8 depot[16];\n\
        mov.u64 %d0, tile;\nmov.u64 %d1, tile+8;\nmov.u64 %d2, generic(tile);\nmov.u64 %d3, table;\nmov.u64 %d4, generic(table);\ncvta.shared.u64 %d5, tile;\nmov.u64 %d6, depot;\ncvta.local.u64 %d7, %d6;\nfence;\n}";
    let module = parse(text).unwrap_or_else(|error| panic!("{error}"));
    let globals = HashMap::from([("table".to_owned(), 0x1000)]);
    let mut program =
        lower(&module, &module.kernels[0], &globals).unwrap_or_else(|error| panic!("{error}"));
    let last = program.ops.len() - 2;
    program.ops[last].action = Action::Step(Box::new(|warp, _, block| {
        let value = |index| Source::Register(index).read(warp, block)[3];
        let values: Vec<_> = (0..8).map(value).collect();
        assert_eq!(
            values,
            [32, 40, SHARED + 32, 0x1000, 0x1000, SHARED + 32, 0, LOCAL]
        );
        Ok(())
    }));
    run_on(&program, 32, &mut []).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn spaces() {
    let cases = || {
        [
            [0x7fff_1234_5678],
            [SHARED],
            [SHARED + 100],
            [LOCAL + 4],
            [SHARED - 1],
        ]
    };
    for (name, expected) in [
        ("global", [1, 0, 0, 0, 1]),
        ("shared::cta", [0, 1, 1, 0, 0]),
        ("local", [0, 0, 0, 1, 0]),
    ] {
        let body = format!("isspacep.{name} %p0, %d1;");
        compare(&body, ["%d1"], "%p0", cases(), |[address]| {
            let at = cases().iter().position(|[other]| *other == address);
            expected[at.unwrap_or(9)]
        });
    }
    compare(
        "cvta.to.shared.u64 %d0, %d1;",
        ["%d1"],
        "%d0",
        [[SHARED + 100]],
        |_| 100,
    );
    compare(
        "cvta.to.global.u64 %d0, %d1;",
        ["%d1"],
        "%d0",
        [[0x1234]],
        |_| 0x1234,
    );
    compare("cvta.local.u64 %d0, %d1;", ["%d1"], "%d0", [[8]], |_| {
        LOCAL + 8
    });
    refusal("isspacep.const %p0, %d1;");
    refusal("cvta.to.shared.u32 %r0, %r1;");
    refusal("cvta.to.nowhere.u64 %d0, %d1;");
}
