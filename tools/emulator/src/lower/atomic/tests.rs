use half::{bf16, f16};

use crate::machine::Fault;
use crate::machine::testing::refused;
use crate::testing::{kernel, run_on};

/// Runs `body` on one block of `threads` threads, and returns the bytes of the buffer.
fn run(body: &str, threads: u32, mut bytes: Vec<u8>) -> Vec<u8> {
    let text = format!("mov.u32 %r0, %tid.x; cvt.u64.u32 %d0, %r0;\n{body}");
    run_on(&kernel(&text), threads, &mut bytes).expect("it runs");
    bytes
}

/// Runs an operation on one thread. Returns the bytes at the address after the operation, and the returned old value.
fn once<const N: usize>(operation: &str, there: [u8; N], operand: &str) -> ([u8; N], [u8; N]) {
    let (register, bits) = match N {
        2 => ("%h1", 16),
        4 => ("%r1", 32),
        _ => ("%d1", 64),
    };
    let text = format!(
        "atom.global.{operation} {register}, [%data], {operand}; st.global.b{bits} [%data+{N}], {register};"
    );
    let bytes = run(&text, 1, [there, there].concat());
    let part = |from: usize| std::array::from_fn(|index| bytes[from + index]);
    (part(0), part(N))
}

fn u32_of(operation: &str, there: u32, operand: u32) -> u32 {
    let (new, old) = once(operation, there.to_le_bytes(), &operand.to_string());
    assert_eq!(u32::from_le_bytes(old), there, "{operation}");
    u32::from_le_bytes(new)
}

#[test]
fn whole_numbers() {
    let big = u32::MAX - 1;
    assert_eq!(u32_of("add.u32", big, 5), 3);
    assert_eq!(u32_of("add.s32", big, 5), 3);
    assert_eq!(u32_of("min.u32", big, 5), 5);
    assert_eq!(u32_of("max.u32", big, 5), big);
    assert_eq!(u32_of("min.s32", big, 5), big);
    assert_eq!(u32_of("max.s32", big, 5), 5);
    assert_eq!(u32_of("and.b32", 12, 10), 8);
    assert_eq!(u32_of("or.b32", 12, 10), 14);
    assert_eq!(u32_of("xor.b32", 12, 10), 6);
    assert_eq!(u32_of("exch.b32", 12, 10), 10);
    assert_eq!(
        [4, 5, 6].map(|there| u32_of("inc.u32", there, 5)),
        [5, 0, 0]
    );
    assert_eq!(
        [0, 1, 5, 6].map(|there| u32_of("dec.u32", there, 5)),
        [5, 0, 4, 5]
    );
    let wide = |operation, there: u64, operand: u64| {
        let (new, old) = once(operation, there.to_le_bytes(), &operand.to_string());
        assert_eq!(u64::from_le_bytes(old), there, "{operation}");
        u64::from_le_bytes(new)
    };
    let big = u64::MAX - 1;
    assert_eq!(wide("add.u64", big, 5), 3);
    assert_eq!(wide("min.u64", big, 5), 5);
    assert_eq!(wide("max.s64", big, 5), 5);
    assert_eq!(wide("min.s64", big, 5), big);
    assert_eq!(wide("exch.b64", big, 5), 5);
}

#[test]
fn compare_and_swap() {
    let swap = |of_type: &str, there: u64, expected: u64| {
        let (new, old) = once(
            &format!("relaxed.gpu.cas.{of_type}"),
            there.to_le_bytes(),
            &format!("{expected}, 77"),
        );
        assert_eq!(u64::from_le_bytes(old), there);
        u64::from_le_bytes(new)
    };
    assert_eq!(swap("b64", 1 << 40, 1 << 40), 77);
    assert_eq!(swap("b64", 1 << 40, 0), 1 << 40);
    let short = |expected: u16| once("cas.b16", 7u16.to_le_bytes(), &format!("{expected}, 9")).0;
    assert_eq!((short(7), short(8)), ([9, 0], [7, 0]));
    // A 16-bit comparison ignores the upper half of the register.
    let text = "mov.u32 %r1, 0x50007; mov.u32 %r2, 9; atom.global.cas.b16 %r3, [%data], %r1, %r2;";
    assert_eq!(run(text, 1, vec![7, 0, 5, 5]), [9, 0, 5, 5]);
    let wide = ".reg .b128 %q<3>; ld.global.b128 %q0, [%data+16]; ld.global.b128 %q1, [%data+32];
        atom.global.cas.b128 %q2, [%data], %q0, %q1; st.global.b128 [%data+16], %q2;";
    let bytes = |parts: [u8; 3]| parts.map(|part| [part; 16]).concat();
    assert_eq!(run(wide, 1, bytes([1, 1, 3])), bytes([3, 1, 3]));
    let mut almost = bytes([1, 1, 3]);
    almost[31] = 2;
    let mut expected = bytes([1, 1, 3]);
    expected[31] = 1;
    assert_eq!(run(wide, 1, almost), expected);
    let exchange = wide.replace("cas", "exch").replace(", %q1;\n", ";\n");
    let exchange = exchange.replace("%q0, %q1;", "%q1;");
    assert_eq!(run(&exchange, 1, bytes([1, 2, 3])), bytes([3, 1, 3]));
}

#[test]
fn floating_point() {
    let add = |there: u32, operand: u32| {
        let (new, _) = once("add.f32", there.to_le_bytes(), &format!("0f{operand:08X}"));
        u32::from_le_bytes(new)
    };
    assert_eq!(add(1.5f32.to_bits(), 2.25f32.to_bits()), 3.75f32.to_bits());
    assert_eq!(
        add(f32::INFINITY.to_bits(), f32::NEG_INFINITY.to_bits()),
        0x7fff_ffff
    );
    // Subnormal numbers are flushed to zero in global memory and kept in shared memory.
    assert_eq!(add(0x8000_0001, 0x8000_0001), 0x8000_0000);
    assert_eq!(add(0x0080_0001, 0x8080_0000), 0);
    let shared = ".shared .align 4 .b8 s[4]; ld.global.u32 %r1, [%data]; st.shared.u32 [s], %r1;
        mov.u32 %r9, s; cvt.u64.u32 %d2, %r9; cvta.shared.u64 %d3, %d2;
        red.PLACE.add.f32 [ADDRESS], 0f80000001; ld.shared.u32 %r1, [s]; st.global.u32 [%data], %r1;";
    for (place, address) in [("shared", "s"), ("relaxed", "%d3")] {
        let text = shared.replace("PLACE", place).replace("ADDRESS", address);
        assert_eq!(
            run(&text, 1, 0x8000_0001u32.to_le_bytes().into()),
            [2, 0, 0, 0x80],
            "{place}"
        );
    }
    let (new, _) = once("add.f64", 1.5f64.to_le_bytes(), "0d4002000000000000");
    assert_eq!(f64::from_le_bytes(new), 3.75);
}

#[test]
fn halves() {
    let cases: [f32; 9] = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        3.0e-5,
        6.0e-8,
        65504.0,
        f32::INFINITY,
        f32::NAN,
    ];
    for a in cases {
        for b in cases {
            let exact = f64::from(f16::from_f32(a)) + f64::from(f16::from_f32(b));
            check(
                "f16",
                f16::from_f32(a).to_bits(),
                f16::from_f32(b).to_bits(),
                f16::from_f64(exact).to_bits(),
            );
            let exact = f64::from(bf16::from_f32(a)) + f64::from(bf16::from_f32(b));
            check(
                "bf16",
                bf16::from_f32(a).to_bits(),
                bf16::from_f32(b).to_bits(),
                bf16::from_f64(exact).to_bits(),
            );
        }
    }

    fn check(of_type: &str, a: u16, b: u16, sum: u16) {
        let infinity = if of_type == "f16" { 0x7c00 } else { 0x7f80 };
        let sum = if sum & 0x7fff > infinity { 0x7fff } else { sum };
        let one = format!("mov.b16 %h1, {b}; atom.global.add.noftz.{of_type} %h2, [%data], %h1;");
        assert_eq!(
            run(&one, 1, a.to_le_bytes().into()),
            sum.to_le_bytes(),
            "{of_type} {a:#x} {b:#x}"
        );
        let pair = format!(
            "mov.b32 %r1, {}; red.global.add.noftz.{of_type}x2 [%data], %r1;",
            u32::from(b) << 16
        );
        let first = if a & 0x7fff > infinity {
            0x7fff
        } else if a == 0x8000 {
            0
        } else {
            a
        };
        let expected = [first.to_le_bytes(), sum.to_le_bytes()].concat();
        assert_eq!(
            run(&pair, 1, [a.to_le_bytes(), a.to_le_bytes()].concat()),
            expected
        );
    }
}

#[test]
fn vectors() {
    let text = "mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f40000000;
        atom.global.v2.f32.add {%f2, %f3}, [%data], {%f0, %f1}; red.global.add.v2.f32 [%data], {%f0, %f0};";
    let bytes = run(text, 32, vec![0; 8]);
    assert_eq!(bytes, [64f32.to_le_bytes(), 96f32.to_le_bytes()].concat());
    let text = "mov.b32 %r1, 0x3c003c00; mov.b32 %r2, 0xbc00c000;
        red.global.max.noftz.v2.f16x2 [%data], {%r1, %r2};";
    let bytes = run(
        text,
        1,
        [0x7e00_4000u32.to_le_bytes(), 0x8000_0000u32.to_le_bytes()].concat(),
    );
    assert_eq!(
        bytes,
        [0x3c00_4000u32.to_le_bytes(), 0x8000_0000u32.to_le_bytes()].concat()
    );
    let text = "mov.b16 %h1, 0x8000; mov.b16 %h2, 0x3f80;
        atom.global.min.noftz.v4.bf16 {%h4, %h5, %h6, %h7}, [%data], {%h1, %h2, %h1, %h2};
        st.global.v4.b16 [%data+8], {%h4, %h5, %h6, %h7};";
    let there = [0u16, 0x4000, 0xbf80, 0x7fff];
    let bytes = |values: &[u16]| {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect::<Vec<_>>()
    };
    let expected = [0x8000, 0x3f80, 0xbf80, 0x3f80, 0, 0x4000, 0xbf80, 0x7fff];
    assert_eq!(
        run(text, 1, bytes(&[there, [0; 4]].concat())),
        bytes(&expected)
    );
}

/// Each lane observes the writes of the lanes before it.
#[test]
fn lanes_come_one_after_the_other() {
    let text = "mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %data, %d1;
        atom.global.add.u32 %r1, [%data+256], 1; st.global.u32 [%d2], %r1;";
    let bytes = run(text, 64, vec![0; 260]);
    let words: Vec<_> = bytes.chunks_exact(4).map(|word| word[0]).collect();
    assert_eq!(words, (0..=64).collect::<Vec<u8>>());
    let wrong = run_on(
        &kernel("add.s64 %d1, %data, 2; red.global.add.u32 [%d1], 1;"),
        1,
        &mut [0; 8],
    );
    assert!(matches!(
        wrong.expect_err("not aligned").fault,
        Fault::Misaligned { bytes: 4, .. }
    ));
}

#[test]
fn unknown_forms_are_refused() {
    for text in [
        "atom.global.add.b32 %r1, [%data], 1;",
        "atom.global.inc.s32 %r1, [%data], 1;",
        "atom.global.u32 %r1, [%data], 1;",
        "atom.global.add %r1, [%data], 1;",
        "atom.global.cas.b32 %r1, [%data], 1;",
        "atom.local.add.u32 %r1, [%data], 1;",
        "red.global.add.v2.f32 [%data], %f1;",
        "atom.global.add.b128 %r1, [%data], 1;",
        "atom.global.min.f32 %f1, [%data], %f2;",
    ] {
        assert!(refused(text).is_some(), "{text}");
    }
}
