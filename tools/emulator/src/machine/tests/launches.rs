//! Tests of grids and of the counts.

use crate::machine::testing::{words, words_with};
use crate::machine::{Counts, Fault, Kind, Options};
use crate::testing::{kernel, run_with};

const SCALED: &str = "
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3; mul.wide.u32 %d0, %r4, 4; add.s64 %d1, %data, %d0;
    ld.global.u32 %r5, [%d1]; mul.lo.u32 %r6, %r5, 3; st.global.u32 [%d1], %r6;";

/// Checks that one and several host threads give the same bits and the same counts.
#[test]
fn threads_of_the_host_change_nothing() {
    let program = kernel(SCALED);
    let input: Vec<u8> = (0..100 * 64u32).flat_map(u32::to_le_bytes).collect();
    let run = |threads| {
        let mut bytes = input.clone();
        let options = Options {
            threads,
            touched: true,
            ..Options::default()
        };
        let counts = run_with(&program, [100, 1, 1], [64, 1, 1], &mut bytes, options);
        (bytes, counts.expect("it runs"))
    };
    let (bytes, counts) = run(1);
    let tripled = (0..100 * 64u32).flat_map(|word| (3 * word).to_le_bytes());
    assert_eq!(bytes, tripled.collect::<Vec<_>>());
    assert_eq!(run(3), (bytes, counts.clone()));
    assert_eq!(counts.touched_sectors, (800, 800));
    assert_eq!(counts.global_sectors, (800, 800));
}

/// Checks that the first failing block is reported, on any number of host threads.
#[test]
fn the_first_failure_is_told() {
    let text = SCALED.replace("ld.global.u32 %r5, [%d1]", "ld.global.u32 %r5, [%d1+2048]");
    let program = kernel(&text);
    for threads in [1, 4] {
        let options = Options {
            threads,
            ..Options::default()
        };
        let mut bytes = vec![0; 100 * 64 * 4];
        let failure = run_with(&program, [100, 1, 1], [64, 1, 1], &mut bytes, options);
        let failure = failure.expect_err("it reads beyond the end");
        assert_eq!(failure.place.block, [92, 0, 0]);
        assert!(
            matches!(
                failure.fault,
                Fault::Address {
                    lane: 0,
                    bytes: 4,
                    ..
                }
            ),
            "{failure}"
        );
    }
}

/// Blocks before a failed block run to their end, even if they began later or are slow.
#[test]
fn a_slow_block_fails_first() {
    let body = "
        mov.u32 %r1, %ctaid.x; setp.ge.u32 %p1, %r1, 8; @%p1 bra WRONG;
        mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 30000; @%p2 bra LOOP;
        setp.lt.u32 %p1, %r1, 7; @%p1 ret;
        WRONG: ld.global.u32 %r3, [%data+4];";
    let options = Options {
        threads: 2,
        ..Options::default()
    };
    let mut bytes = [0; 4];
    let ran = run_with(&kernel(body), [64, 1, 1], [32, 1, 1], &mut bytes, options);
    assert_eq!(ran.expect_err("it reads beyond").place.block, [7, 0, 0]);
}

fn instructions(counts: &Counts) -> u64 {
    counts.instructions.iter().sum()
}

/// The second warp of the second block is the longest.
#[test]
fn the_longest_warp() {
    let body = "
        mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 1; @%p1 ret;
        setp.lt.u32 %p1, %r0, 32; @%p1 ret;
        mov.u32 %r2, 0; LOOP: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 100; @%p2 bra LOOP;";
    let (_, counts) = words_with(body, 3, 64, Options::default()).expect("it runs");
    let others = instructions(&counts) - counts.longest_warp;
    // Three instructions per iteration, and fewer than 20 before the loop.
    assert!((300..320).contains(&counts.longest_warp), "{counts:?}");
    assert!(others < 5 * 20, "{counts:?}");
}

/// Checks the counts of tensor cores, and of their operands in shared memory.
#[test]
fn matrices_are_counted() {
    let body = "
        .shared .align 16 .b8 s[4096];
        mov.u32 %r9, s; shl.b32 %r8, %r0, 4; add.u32 %r8, %r8, %r9;
        st.shared.v4.b32 [%r8], {%r0, %r0, %r0, %r0};
        shl.b32 %r7, %r0, 7; add.u32 %r7, %r7, %r9;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r8];
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r7];
        mov.u32 %r5, 0; mov.f32 %f0, 0f00000000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {%f1, %f2, %f3, %f4}, {%r5, %r5, %r5, %r5}, {%r5, %r5}, {%f0, %f0, %f0, %f0};
        wmma.load.c.sync.aligned.row.m16n16k16.shared.f32
            {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8}, [%r9];";
    let (_, counts) = words_with(body, 1, 32, Options::default()).expect("it runs");
    assert_eq!(counts.matrix_flops, 2 * 16 * 8 * 16);
    // Matrices that are stored and loaded side by side, two matrices with rows in the same banks, and a kilobyte.
    assert_eq!(counts.shared_wavefronts, 4 + 4 + 2 * 8 + 8);
    assert_eq!(counts.bank_conflicts, 2 * 7);
    assert_eq!(counts.instructions[Kind::Matrix as usize], 4);
}

#[test]
fn what_is_counted() {
    let options = Options {
        touched: true,
        ..Options::default()
    };
    // Four blocks on the same 128 bytes.
    let body = "
        .shared .align 4 .b8 s[4096];
        ld.global.u32 %r1, [%d1];
        setp.lt.u32 %p1, %r0, 8; @%p1 st.global.u32 [%d1], %r0;
        mov.u32 %r2, s; shl.b32 %r3, %r0, 3; add.u32 %r3, %r2, %r3; st.shared.u32 [%r3], 0;
        red.shared.add.u32 [%r3], 1; @%p1 red.global.add.u32 [%data], 0;";
    let (_, counts) = words_with(body, 4, 32, options).expect("it runs");
    assert_eq!(counts.global_bytes, (4 * (128 + 32), 4 * (32 + 32)));
    assert_eq!(counts.global_sectors, (4 * (4 + 1), 4 * (1 + 1)));
    assert_eq!(counts.touched_sectors, (4, 1));
    assert_eq!(counts.bank_conflicts, 4 * (1 + 1));
    assert_eq!(counts.shared_wavefronts, 4 * (2 + 2));
    assert_eq!(counts.longest_warp, instructions(&counts) / 4);
    assert_eq!(counts.atomics, 4 * (32 + 8));
    assert_eq!(counts.instructions[Kind::Atomic as usize], 8);
    assert_eq!(counts.instructions[Kind::Shared as usize], 4);
    assert_eq!(counts.instructions[Kind::Global as usize], 8);
    let (_, counts) = words_with(body, 4, 32, Options::default()).expect("it runs");
    assert_eq!(counts.touched_sectors, (0, 0));
}

#[test]
fn no_block_and_no_thread() {
    assert_eq!(words("st.global.u32 [%d1], 1;", 0), Ok(vec![]));
    let program = kernel("trap;");
    let mut bytes = [0; 4];
    let ran = run_with(
        &program,
        [0, 1, 1],
        [32, 1, 1],
        &mut bytes,
        Options::default(),
    );
    assert!(ran.is_ok());
    let failure = words("trap;", 1).expect_err("it traps");
    assert!(failure.to_string().contains("trap"), "{failure}");
}
