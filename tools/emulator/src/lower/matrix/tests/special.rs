//! Tests of rounding, of rows in shared memory, and of refused forms.

use super::{HALF, Numbers, expected, get, matrix, put};
use crate::lower::matrix::element::{Element, F16};
use crate::testing::{kernel, run_on};

#[test]
fn sums_are_rounded_once_and_nan_is_canonical() {
    // A row of `A` times a column of `B`. Lanes 0 to 3 hold both.
    let dot = |a: [f32; 8], b: [f32; 8], c: f32| {
        let mut buffer = vec![0u8; 256];
        for (i, (a, b)) in a.into_iter().zip(b).enumerate() {
            put(&mut buffer, 4 * i, 32, a.to_bits().into());
            put(&mut buffer, 128 + 4 * i, 32, b.to_bits().into());
        }
        let body = format!(
            "mov.u32 %r0, %laneid;\nmul.wide.u32 %d0, %r0, 4;\nadd.u64 %d0, %d0, %data;\n\
             mov.u32 %r1, 0;\nmov.u32 %r2, 0;\nmov.u32 %r3, 0;\nmov.u32 %r4, 0;\nmov.u32 %r5, 0;\nmov.u32 %r6, 0;\n\
             setp.lt.u32 %p0, %r0, 4;\n\
             @%p0 ld.global.b32 %r1, [%d0];\n@%p0 ld.global.b32 %r3, [%d0+16];\n\
             @%p0 ld.global.b32 %r5, [%d0+128];\n@%p0 ld.global.b32 %r6, [%d0+144];\n\
             mov.b32 %f0, {:#x};\n\
             mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%f1, %f2, %f3, %f4}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%f0, %f0, %f0, %f0}};\n\
             setp.eq.u32 %p0, %r0, 0;\n@%p0 st.global.b32 [%d0], %f1;",
            c.to_bits()
        );
        run_on(&kernel(&body), 32, &mut buffer).unwrap_or_else(|error| panic!("{error}"));
        get(&buffer, 0, 32) as u32
    };
    let one = [1.0; 8];
    let ulp = f32::EPSILON;
    // 1 plus 8 halves of its last place. Added one at a time, all halves would be lost.
    assert_eq!(dot([ulp / 2.0; 8], one, 1.0), (1.0 + 4.0 * ulp).to_bits());
    // The accumulator is added first, and is lost next to a term that is 2^53 times larger.
    assert_eq!(
        dot([3e38, 3e38, -3e38, -3e38, 1.0, 0.0, 0.0, 0.0], one, 2.0),
        1f32.to_bits()
    );
    assert_eq!(dot([3e38; 8], one, 0.0), f32::INFINITY.to_bits());
    let mut zero = one;
    zero[3] = 0.0;
    assert_eq!(dot([f32::INFINITY; 8], zero, 0.0), 0x7fff_ffff);
    assert_eq!(dot(one, one, f32::from_bits(0xffc0_0001)), 0x7fff_ffff);
    // The lower 13 bits of an element are ignored. The lower bits of the sum are not.
    let mut first = [0.0; 8];
    first[0] = 1.0 + 4096.0 * ulp;
    assert_eq!(dot(first, one, ulp), (1.0 + ulp).to_bits());
}

#[test]
fn whole_sums_saturate_or_wrap() {
    for (extra, wanted) in [("", i32::MAX.wrapping_add(32)), (".satfinite", i32::MAX)] {
        let body = format!(
            "mov.u32 %r0, 0x01010101;\nmov.u32 %r1, {};\n\
             mma.sync.aligned.m16n8k32.row.col{extra}.s32.s8.s8.s32 {{%r2, %r3, %r4, %r5}}, {{%r0, %r0, %r0, %r0}}, {{%r0, %r0}}, {{%r1, %r1, %r1, %r1}};\n\
             mov.u32 %r6, %laneid;\nmul.wide.u32 %d0, %r6, 4;\nadd.u64 %d0, %d0, %data;\nst.global.u32 [%d0], %r5;",
            i32::MAX
        );
        let mut buffer = vec![0; 128];
        run_on(&kernel(&body), 32, &mut buffer).unwrap_or_else(|error| panic!("{error}"));
        assert!(
            buffer
                .as_chunks()
                .0
                .iter()
                .all(|bytes| i32::from_le_bytes(*bytes) == wanted)
        );
    }
}

/// Loads row-major f16 matrices from shared memory with `ldmatrix`, as kernels do, multiplies them, and stores them
/// with `stmatrix`.
#[test]
fn rows_feed_products() {
    let body = "
        .shared .align 128 .b8 tile[2048];
        mov.u32 %r0, %laneid;
        mul.wide.u32 %d0, %r0, 16;
        add.u64 %d1, %d0, %data;
        mov.u64 %d2, tile;
        add.u64 %d3, %d2, %d0;
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];
        st.shared.v4.u32 [%d3], {%r1, %r2, %r3, %r4};
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1+512];
        st.shared.v4.u32 [%d3+512], {%r1, %r2, %r3, %r4};
        // Row lane % 16 of A, its left or right half.
        and.b32 %r5, %r0, 15;
        shr.u32 %r6, %r0, 4;
        mul.lo.u32 %r7, %r5, 32;
        mad.lo.u32 %r7, %r6, 16, %r7;
        cvt.u32.u64 %r8, %d2;
        add.u32 %r9, %r8, %r7;
        ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%r10, %r11, %r12, %r13}, [%r9];
        // Row lane % 16 of B, whose rows are k: transposed it is what a product takes.
        mad.lo.u32 %r14, %r5, 16, %r8;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r15, %r16}, [%r14+512];
        mov.b32 %r20, 0;
        mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r21, %r22}, {%r10, %r11, %r12, %r13}, {%r15, %r16}, {%r20, %r20};
        stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r14+1024], {%r21, %r22};
        ld.shared.v2.u32 {%r1, %r2}, [%r14+1024];
        and.b32 %r5, %r0, 15;
        mul.wide.u32 %d4, %r5, 16;
        add.u64 %d4, %d4, %data;
        st.global.v2.u32 [%d4+1024], {%r1, %r2};
        ld.shared.v2.u32 {%r1, %r2}, [%r14+1032];
        st.global.v2.u32 [%d4+1032], {%r1, %r2};
        movmatrix.sync.aligned.m8n8.trans.b16 %r23, %r21;
        mul.wide.u32 %d5, %r0, 4;
        add.u64 %d5, %d5, %data;
        st.global.u32 [%d5+1280], %r23;
        stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r14+1024], {%r21};
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r24}, [%r14+1024];
        st.global.u32 [%d5+1408], %r24;";
    let mut numbers = Numbers(5);
    let ((a, bits_a), (b, bits_b)) = (
        matrix(&mut numbers, HALF, 16, 16),
        matrix(&mut numbers, HALF, 16, 8),
    );
    let mut buffer = vec![0u8; 2048];
    for (number, bits) in bits_a.iter().chain(&bits_b).enumerate() {
        put(&mut buffer, 2 * number, 16, *bits);
    }
    run_on(&kernel(body), 32, &mut buffer).unwrap_or_else(|error| panic!("{error}"));
    let wanted = expected(&a, &b, &vec![0.0; 128], [16, 8, 16]);
    let found = |at: usize| F16::value(get(&buffer, at, 16));
    for (number, wanted) in wanted.iter().enumerate() {
        assert_eq!(found(1024 + 2 * number), *wanted, "element {number}");
    }
    // The upper half of `D`, transposed, as the lanes hold it.
    for (lane, part) in (0..32).flat_map(|lane| [(lane, 0), (lane, 1)]) {
        let (row, column) = (lane / 4, lane % 4 * 2 + part);
        let wanted = wanted[column * 8 + row];
        assert_eq!(found(1280 + 4 * lane + 2 * part), wanted);
        assert_eq!(found(1408 + 4 * lane + 2 * part), wanted);
    }
}

#[test]
fn what_is_not_known_is_refused_when_loaded() {
    let refused = |line: &str| {
        let text = format!(
            ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{{\n.reg .b32 %r<64>;\n.reg .f32 %f<64>;\n.reg .b64 %d<8>;\n{line}\n}}"
        );
        let module = crate::ptx::parse(&text).unwrap_or_else(|error| panic!("{error}"));
        crate::lower::lower(&module, &module.kernels[0], &Default::default()).is_err()
    };
    let (a, b, f) = ("{%r0, %r1, %r2, %r3}", "{%r4, %r5}", "{%f0, %f1, %f2, %f3}");
    assert!(!refused(&format!(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {f}, {a}, {b}, {f};"
    )));
    for line in [
        format!("mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {f}, {a}, {b}, {f};"),
        format!("mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 {f}, {a}, {b}, {f};"),
        format!("mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {f}, {a}, {b}, {f};"),
        format!("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {f}, {a}, {a}, {f};"),
        format!("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {f}, {b}, {b}, {f};"),
        format!("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {f}, {b}, {b}, {f}, %r9, 0;"),
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r2];".into(),
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1}, [%r2];".into(),
        "wmma.load.a.sync.aligned.row.m16n16k16.bf16 {%r0, %r1}, [%d0], 16;".into(),
        "wgmma.fence.sync.aligned;".into(),
    ] {
        assert!(refused(&line), "{line}");
    }
}

#[test]
fn half_a_warp_is_no_warp() {
    let body = "mov.b32 %r0, 0;\nmma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r0}, {%r0}, {%r0, %r0};";
    assert!(run_on(&kernel(body), 32, &mut []).is_ok());
    assert!(run_on(&kernel(body), 16, &mut []).is_err());
}

#[test]
fn products_in_f64_are_fused() {
    let body = "
        mov.u32 %r0, %laneid;
        mul.wide.u32 %d0, %r0, 8;
        add.u64 %d0, %d0, %data;
        ld.global.b64 %d1, [%d0];
        ld.global.b64 %d2, [%d0+256];
        mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d3, %d4}, {%d1}, {%d1}, {%d2, %d2};
        st.global.b64 [%d0], %d4;";
    let (a, c) = (1.0 + 2f64.powi(-30), -1.0 - 2f64.powi(-29));
    let mut buffer = vec![0u8; 512];
    for lane in 0..32 {
        // Only the first of four columns of `A`, and of four rows of `B`, is set.
        let a = if lane % 4 == 0 { a } else { 0.0 };
        put(&mut buffer, 8 * lane, 64, a.to_bits());
        put(&mut buffer, 256 + 8 * lane, 64, c.to_bits());
    }
    run_on(&kernel(body), 32, &mut buffer).unwrap_or_else(|error| panic!("{error}"));
    let wanted = 2f64.powi(-60).to_bits();
    assert!((0..32).all(|lane| get(&buffer, 8 * lane, 64) == wanted));
}

#[test]
fn fragments_of_bad_addresses_are_told() {
    let load = |address: &str, stride: &str| {
        let body = format!(
            "mov.u32 %r0, %laneid;\nmul.wide.u32 %d1, %r0, 16;\nadd.u64 %d1, %d1, %data;\n\
             wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}}, [{address}], {stride};"
        );
        run_on(&kernel(&body), 32, &mut [0; 2048]).map(|counts| counts.global_sectors.0)
    };
    // 16 lines of two sectors each.
    assert_eq!(load("%data", "16"), Ok(32));
    // Each half of the lines is counted separately.
    assert_eq!(load("%data+16", "16"), Ok(34));
    assert!(load("%data+8", "16").is_err());
    assert!(load("%data", "18").is_err());
    assert!(load("%data", "32").is_ok());
    assert!(load("%data", "36").is_err());
    assert!(load("%d1", "16").is_err());
    assert!(load("%data", "%r0").is_err());
    // Lines of 8 bytes.
    let short = |address: &str, stride: u32| {
        let line = "wmma.load.b.sync.aligned.row.m32n8k16.global.s8 {%r1}";
        run_on(
            &kernel(&format!("{line}, [{address}], {stride};")),
            32,
            &mut [0; 1024],
        )
        .is_ok()
    };
    assert!(short("%data", 16) && !short("%data+8", 16) && !short("%data", 8));
}
