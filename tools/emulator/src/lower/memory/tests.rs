use crate::machine::testing::{refused, words};
use crate::machine::{Fault, Kind};
use crate::testing::{kernel, run_on};

/// Runs `body` on one block of `threads` threads, and returns the bytes of the buffer. `%r0` is the thread.
fn run(body: &str, threads: u32, mut bytes: Vec<u8>) -> Result<Vec<u8>, Fault> {
    let program = kernel(&format!("mov.u32 %r0, %tid.x;\n{body}"));
    let ran = run_on(&program, threads, &mut bytes);
    ran.map(|_| bytes).map_err(|failure| failure.fault)
}

/// Returns the result of loading `of_type` into `register`. The result is stored as 64 bits.
fn loaded(of_type: &str, register: &str, wide: &str) -> u64 {
    let text =
        format!("ld.global.{of_type} {register}, [%data+8]; {wide} st.global.b64 [%data], %d9;");
    let mut bytes = vec![0; 8];
    bytes.extend(0x8091_a2b3_c4d5_e6f7u64.to_le_bytes());
    let bytes = run(&text, 1, bytes).expect("it runs");
    u64::from_le_bytes(std::array::from_fn(|index| bytes[index]))
}

#[test]
fn widths_and_signs() {
    let into_64 = |of_type| loaded(of_type, "%d9", "");
    assert_eq!(into_64("u8"), 0xf7);
    assert_eq!(into_64("b8"), 0xf7);
    assert_eq!(into_64("s8"), 0xffff_ffff_ffff_fff7);
    assert_eq!(into_64("u16"), 0xe6f7);
    assert_eq!(into_64("s16"), 0xffff_ffff_ffff_e6f7);
    assert_eq!(into_64("u32"), 0xc4d5_e6f7);
    assert_eq!(into_64("s32"), 0xffff_ffff_c4d5_e6f7);
    assert_eq!(into_64("b64"), 0x8091_a2b3_c4d5_e6f7);
    assert_eq!(into_64("s64"), 0x8091_a2b3_c4d5_e6f7);
    // Bits beyond the width of a register stay zero.
    let into_32 = |of_type| loaded(of_type, "%r9", "cvt.u64.u32 %d9, %r9;");
    assert_eq!(into_32("s8"), 0xffff_fff7);
    assert_eq!(into_32("u16"), 0xe6f7);
    assert_eq!(into_32("f32"), 0xc4d5_e6f7);
    assert_eq!(loaded("s8", "%h9", "cvt.u64.u16 %d9, %h9;"), 0xfff7);
}

/// Vectors, sinks, constants, narrow stores from wide registers, and all cache modifiers.
#[test]
fn vectors_and_modifiers() {
    let bytes: Vec<u8> = (0..128).collect();
    let copied = |text: &str| run(text, 1, bytes.clone()).expect("it runs");
    for (load, store, count) in [
        (
            "ld.global.nc.L1::no_allocate.L2::128B.v2.u8 {%h1, %h2}",
            "st.global.v2.u8 [%data+64], {%h1, %h2}",
            2,
        ),
        (
            "ldu.global.v4.u8 {%h1, %h2, %h3, %h4}",
            "st.global.cs.v4.b8 [%data+64], {%h1, %h2, %h3, %h4}",
            4,
        ),
        (
            "ld.volatile.global.v4.u16 {%h1, %h2, %h3, %h4}",
            "st.global.wt.v4.u16 [%data+64], {%h1, %h2, %h3, %h4}",
            8,
        ),
        (
            "ld.relaxed.gpu.global.v2.f32 {%f1, %f2}",
            "st.release.sys.global.v2.f32 [%data+64], {%f1, %f2}",
            8,
        ),
        (
            "ld.acquire.cta.global.v4.b32 {%r1, %r2, %r3, %r4}",
            "st.weak.v4.b32 [%data+64], {%r1, %r2, %r3, %r4}",
            16,
        ),
        (
            "ld.v2.u64 {%d1, %d2}",
            "st.global.v2.b64 [%data+64], {%d1, %d2}",
            16,
        ),
        (
            "ld.global.L2::cache_hint.v4.b64 {%d1, %d2, %d3, %d4}",
            "st.global.v4.b64 [%data+64], {%d1, %d2, %d3, %d4}",
            32,
        ),
        (
            "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}",
            "st.global.v8.b32 [%data+64], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}",
            32,
        ),
    ] {
        let load = load.replacen('}', "}, [%data+32]", 1);
        let mut expected = bytes.clone();
        expected.copy_within(32..32 + count, 64);
        assert_eq!(copied(&format!("{load}; {store};")), expected, "{load}");
    }
    let wide = ".reg .b128 %q; ld.global.b128 %q, [%data+16]; st.global.b128 [%data], %q;";
    let mut expected = bytes.clone();
    expected.copy_within(16..32, 0);
    assert_eq!(copied(wide), expected);
    let some = "ld.global.v4.u8 {_, %h1, _, %h2}, [%data+16]; st.global.v2.u8 [%data], {%h2, 77};
        mov.u32 %r1, 0x12345678; st.global.u8 [%data+2], %r1; st.global.u16 [%data+4], %r1;
        st.global.f32 [%data+8], 0f3F800000;";
    let mut expected = bytes.clone();
    expected[..3].copy_from_slice(&[19, 77, 0x78]);
    expected[4..6].copy_from_slice(&[0x78, 0x56]);
    expected[8..12].copy_from_slice(&1f32.to_le_bytes());
    assert_eq!(copied(some), expected);
}

#[test]
fn addresses_may_be_those_of_other_registers_that_are_loaded() {
    let text = "ld.global.v2.u64 {%data, %d1}, [%data]; mov.u64 %d2, %data;";
    assert!(run(text, 32, vec![0; 16]).is_ok());
}

/// Each lane has its own 64 bytes of memory, accessed by local and by generic addresses.
#[test]
fn local_memory_is_each_threads_own() {
    let body = "
        .local .align 16 .b8 own[64];
        mov.u64 %d2, own; mul.lo.u32 %r1, %r0, 3; cvta.local.u64 %d3, %d2;
        st.local.u32 [%d2+8], %r1; st.u32 [%d3+12], %r0;
        ld.u32 %r2, [%d3+8]; ld.local.u32 %r3, [own+12];
        add.u32 %r4, %r2, %r3; st.global.u32 [%d1], %r4;";
    assert_eq!(
        words(body, 64),
        Ok((0..64).map(|thread| 4 * thread).collect::<Vec<_>>())
    );
    let beyond = words(
        ".local .align 4 .b8 own[64]; ld.local.u32 %r1, [own+64];",
        32,
    );
    let fault = beyond.expect_err("it ends there").fault;
    assert!(
        matches!(
            fault,
            Fault::Address {
                space: crate::ptx::Space::Local,
                ..
            }
        ),
        "{fault}"
    );
}

#[test]
fn parameters_by_name_and_by_address() {
    let body = "
        mov.b64 %d2, count; ld.param.u32 %r1, [%d2]; ld.param.u16 %h1, [count+0];
        cvta.param.u64 %d3, %d2; ld.u32 %r2, [%d3]; ld.param::entry.u64 %d4, [data];
        cvt.u32.u16 %r3, %h1; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;
        sub.s64 %d5, %d4, %data; cvt.u32.u64 %r4, %d5; add.u32 %r1, %r1, %r4;
        st.global.u32 [%d1], %r1;";
    assert_eq!(words(body, 33), Ok(vec![3 * 33 * 4; 33]));
    let beyond = words("ld.param.u64 %d2, [count+8];", 1)
        .expect_err("nothing is there")
        .fault;
    assert!(
        matches!(beyond, Fault::Address { bytes: 8, .. }),
        "{beyond}"
    );
    let generic = "mov.b64 %d2, count; cvta.param.u64 %d3, %d2; st.u32 [%d3], 1;";
    assert!(matches!(
        words(generic, 1).expect_err("read only").fault,
        Fault::Undefined(_)
    ));
}

/// Generic addresses of one instruction in three different spaces.
#[test]
fn lanes_may_go_to_different_spaces() {
    let body = "
        .shared .align 4 .b8 s[256]; .local .align 4 .b8 l[4];
        mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;
        add.u32 %r3, %r0, 1000; st.shared.u32 [%r2], %r3;
        add.u32 %r3, %r0, 2000; st.local.u32 [l], %r3;
        add.u32 %r3, %r0, 3000; st.global.u32 [%d1], %r3;
        cvt.u64.u32 %d2, %r2; cvta.shared.u64 %d3, %d2; mov.u64 %d4, l; cvta.local.u64 %d4, %d4;
        and.b32 %r4, %r0, 3; setp.eq.u32 %p1, %r4, 1; setp.eq.u32 %p2, %r4, 2;
        selp.b64 %d5, %d3, %d1, %p1; selp.b64 %d5, %d4, %d5, %p2;
        ld.u32 %r5, [%d5]; add.u32 %r5, %r5, 1; st.u32 [%d5], %r5; ld.u32 %r6, [%d5];
        st.global.u32 [%d1], %r6;";
    let expected = (0..64).map(|thread| thread + 1 + [3000, 1000, 2000, 3000][thread as usize % 4]);
    assert_eq!(words(body, 64), Ok(expected.collect::<Vec<_>>()));
}

#[test]
fn wrong_addresses_are_told_with_their_lane() {
    let shifted = |offset: i32, of_type: &str| {
        let text = format!(
            "mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %data, %d0; ld.global.{of_type} %d2, [%d1+{offset}];"
        );
        run(&text, 32, vec![0; 128]).expect_err("it is wrong")
    };
    let Fault::Address {
        lane,
        address,
        bytes,
        ref what,
        ..
    } = shifted(64, "u32")
    else {
        panic!("it is outside");
    };
    assert_eq!((lane, bytes, address % 512), (16, 4, 128));
    assert!(
        what.starts_with("0 bytes behind the end of 128 bytes"),
        "{what}"
    );
    assert!(matches!(shifted(-4, "u32"), Fault::Address { lane: 0, .. }));
    assert!(matches!(shifted(4, "u32"), Fault::Address { lane: 31, .. }));
    assert!(matches!(
        shifted(2, "u32"),
        Fault::Misaligned {
            lane: 0,
            bytes: 4,
            ..
        }
    ));
    assert!(matches!(
        shifted(0, "u64"),
        Fault::Misaligned {
            lane: 1,
            bytes: 8,
            ..
        }
    ));
    // Only active lanes are checked.
    let text = "setp.lt.u32 %p1, %r0, 32; mul.wide.u32 %d0, %r0, 4; add.s64 %d1, %data, %d0;
        @%p1 st.global.u32 [%d1], %r0;";
    assert!(run(text, 64, vec![0; 128]).is_ok());
    let fault = run("ld.shared.u32 %r1, [%r0];", 1, vec![]).expect_err("there is none");
    assert!(
        matches!(
            fault,
            Fault::Address {
                space: crate::ptx::Space::Shared,
                ..
            }
        ),
        "{fault}"
    );
    let vector = "add.s64 %d1, %data, 8; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];";
    let fault = run(vector, 1, vec![0; 64]).expect_err("a vector is one access");
    assert!(
        matches!(fault, Fault::Misaligned { bytes: 16, .. }),
        "{fault}"
    );
}

#[test]
fn hints_do_nothing_and_what_is_discarded_is_gone() {
    let text = "prefetch.global.L2 [%data]; prefetchu.L1 [%data];
        applypriority.global.L2::evict_normal [%data], 128;
        createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %d2, 0f3F800000;
        ld.global.L2::cache_hint.u32 %r1, [%data], %d2; st.global.u32 [%data+4], %r1;";
    let bytes: Vec<u8> = (0..128).collect();
    let mut expected = bytes.clone();
    expected.copy_within(0..4, 4);
    assert_eq!(run(text, 1, bytes.clone()), Ok(expected));
    assert_eq!(
        run("discard.global.L2 [%data], 128;", 1, bytes),
        Ok(vec![0xff; 128])
    );
}

#[test]
fn kinds_of_instructions() {
    let body = "ld.global.u32 %r1, [%data]; ld.u32 %r1, [%data]; ld.param.u64 %d1, [data];";
    let counts = run_on(&kernel(body), 1, &mut [0; 4]).expect("it runs");
    assert_eq!(counts.instructions[Kind::Global as usize], 2);
    // One of these accesses is made by the test.
    assert_eq!(counts.instructions[Kind::Private as usize], 2);
}

#[test]
fn unknown_forms_are_refused() {
    for text in [
        "ld.global.v3.u32 {%r1, %r2, %r3}, [%data];",
        "ld.global.v2.u32 %r1, [%data];",
        "ld.global.u32 {%r1, %r2}, [%data];",
        "ld.global.unknown.u32 %r1, [%data];",
        "ld.global %r1, [%data];",
        "ld.global.u32 %p1, [%data];",
        "ld.global.v8.b64 {%d1, %d2, %d3, %d4, %d5, %d6, %d7, %d8}, [%data];",
        "st.param.u32 [data], %r1;",
        "st.const.u32 [%data], %r1;",
        "st.global.u32 [%data], %p1;",
        "ld.global.u32 %r1, %d1;",
    ] {
        assert!(refused(text).is_some(), "{text}");
    }
}
