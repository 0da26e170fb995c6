//! Tests of warps that wait for each other.

use crate::machine::Fault;
use crate::machine::testing::words;
use crate::testing::{kernel, run_blocks};

/// Each thread stores its number, and reads the number of the opposite thread.
const REVERSE: &str = "
    .shared .align 4 .b8 s[4096];
    mov.u32 %r9, %ntid.x; mov.u32 %r1, s;
    shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2; st.shared.u32 [%r2], %r0;
    bar.sync 0;
    sub.u32 %r3, %r9, %r0; shl.b32 %r3, %r3, 2; add.u32 %r3, %r1, %r3;
    ld.shared.u32 %r4, [%r3+-4]; st.global.u32 [%d1], %r4;";

#[test]
fn blocks_of_all_sizes_pass_a_barrier() {
    for threads in [1, 2, 31, 32, 33, 64, 100, 1000, 1024] {
        assert_eq!(
            words(REVERSE, threads),
            Ok((0..threads).rev().collect()),
            "{threads}"
        );
    }
}

#[test]
fn blocks_of_three_dimensions() {
    let body = "
        .shared .align 4 .b8 s[4096];
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mad.lo.u32 %r4, %r3, 5, %r2; mad.lo.u32 %r4, %r4, 7, %r1;
        mad.lo.u32 %r5, %r1, 100, %r2; mad.lo.u32 %r5, %r5, 100, %r3;
        mov.u32 %r6, s; shl.b32 %r7, %r4, 2; add.u32 %r8, %r6, %r7; st.shared.u32 [%r8], %r5;
        bar.sync 0;
        ld.shared.u32 %r9, [%r8]; mul.wide.u32 %d0, %r4, 4; add.s64 %d1, %data, %d0;
        mov.u32 %r10, %ctaid.y; mad.lo.u32 %r9, %r10, 1000000, %r9;
        atom.global.add.u32 %r11, [%d1], %r9;";
    let mut bytes = vec![0; 4 * 7 * 5 * 3];
    run_blocks(&kernel(body), [1, 3, 1], [7, 5, 3], &mut bytes).expect("it runs");
    let mut words = bytes.chunks_exact(4);
    for z in 0..3 {
        for y in 0..5 {
            for x in 0..7 {
                let word = words.next().and_then(|word| word.try_into().ok());
                let word = word.map(u32::from_le_bytes);
                assert_eq!(word, Some(3 * (x * 10_000 + y * 100 + z) + 3_000_000));
            }
        }
    }
}

/// Two pairs of warps. Each pair has its own barrier, which it passes at a different time.
#[test]
fn barriers_of_some_of_the_threads() {
    let body = "
        .shared .align 4 .b8 s[512];
        mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2;
        shr.u32 %r5, %r0, 6; add.u32 %r6, %r5, 1;
        mov.u32 %r7, 0;
        LOOP: add.u32 %r8, %r0, %r7; st.shared.u32 [%r2], %r8;
        bar.sync %r6, 64;
        xor.b32 %r3, %r2, 128; ld.shared.u32 %r4, [%r3];
        bar.sync %r6, 64;
        add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, 9; @%p1 bra LOOP;
        st.global.u32 [%d1], %r4;";
    let expected = (0..128).map(|thread| (thread ^ 32) + 8);
    assert_eq!(words(body, 128), Ok(expected.collect::<Vec<_>>()));
}

/// The first warp produces, and the second warp consumes. Neither may be more than one iteration ahead.
#[test]
fn makers_and_users_arrive_at_each_others_barriers() {
    let body = "
        .shared .align 4 .b8 s[128];
        mov.u32 %r1, s; and.b32 %r2, %r0, 31; shl.b32 %r2, %r2, 2; add.u32 %r2, %r1, %r2;
        mov.u32 %r7, 0; mov.u32 %r9, 0;
        setp.ge.u32 %p1, %r0, 32; @%p1 bra USER;
        MAKER: add.u32 %r8, %r0, %r7; st.shared.u32 [%r2], %r8;
        bar.arrive 1, 64; bar.sync 2, 64;
        add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 5; @%p2 bra MAKER;
        ret;
        USER: bar.sync 1, 64; ld.shared.u32 %r8, [%r2]; add.u32 %r9, %r9, %r8; bar.arrive 2, 64;
        add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 5; @%p2 bra USER;
        st.global.u32 [%d1], %r9;";
    let expected = (0..64).map(|thread| {
        if thread < 32 {
            0
        } else {
            5 * (thread - 32) + 10
        }
    });
    assert_eq!(words(body, 64), Ok(expected.collect::<Vec<_>>()));
}

#[test]
fn warps_that_spin_on_a_flag_let_others_run() {
    let body = "
        .shared .align 4 .b8 s[8];
        setp.ge.u32 %p1, %r0, 32; @%p1 bra USER;
        st.shared.u32 [s], 42; membar.cta; st.volatile.shared.u32 [s+4], 1; ret;
        USER: ld.volatile.shared.u32 %r1, [s+4]; setp.ne.u32 %p2, %r1, 1; @%p2 bra USER;
        ld.shared.u32 %r2, [s]; st.global.u32 [%d1], %r2;";
    let first = |text: &str| text.replace("setp.ge.u32 %p1, %r0, 32", "setp.lt.u32 %p1, %r0, 32");
    let flag = "st.shared.u32 [s+4], 0; bar.sync 0;\n";
    let body = body.replace("setp.ge", &format!("{flag}setp.ge"));
    let expected = (0..64).map(|thread| if thread < 32 { 0 } else { 42 });
    assert_eq!(words(&body, 64), Ok(expected.collect::<Vec<_>>()));
    let expected = (0..64).map(|thread| if thread < 32 { 42 } else { 0 });
    assert_eq!(words(&first(&body), 64), Ok(expected.collect::<Vec<_>>()));
}

#[test]
fn votes_of_a_block() {
    let vote = |instruction: &str, condition: &str, threads| {
        let body = format!(
            "setp.{condition} %p1, %r0, 40; mov.u32 %r1, 0; {instruction}
             st.global.u32 [%d1], %r1;"
        );
        words(&body, threads).expect("it runs")
    };
    let count = "bar.red.popc.u32 %r1, 0, %p1;";
    assert_eq!(vote(count, "lt.u32", 100), [40; 100]);
    assert_eq!(
        vote("bar.red.popc.u32 %r1, 0, !%p1;", "lt.u32", 100),
        [60; 100]
    );
    let and = "bar.red.and.pred %p2, 0, %p1; selp.u32 %r1, 1, 2, %p2;";
    assert_eq!(vote(and, "lt.u32", 100), [2; 100]);
    assert_eq!(vote(and, "lt.u32", 40), [1; 40]);
    let or = "barrier.sync 3; barrier.cta.red.or.pred %p2, 0, %p1; selp.u32 %r1, 1, 2, %p2;";
    assert_eq!(vote(or, "eq.u32", 100), [1; 100]);
    assert_eq!(vote(or, "eq.u32", 40), [2; 40]);
    // Two votes in sequence.
    let twice = format!(
        "{count} setp.lt.u32 %p1, %r0, 50; bar.red.popc.u32 %r2, 0, %p1; add.u32 %r1, %r1, %r2;"
    );
    assert_eq!(vote(&twice, "lt.u32", 100), [90; 100]);
}

#[test]
fn a_barrier_that_not_all_reach() {
    let some = "setp.lt.u32 %p1, %r0, 40; @%p1 bar.sync 0; bar.sync 1;";
    let failure = words(some, 64).expect_err("some wait elsewhere");
    assert!(
        matches!(failure.fault, Fault::Deadlock(_) | Fault::Undefined(_)),
        "{failure}"
    );
    let some = "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 0; @!%p1 bar.sync 1;";
    let failure = words(some, 64).expect_err("each waits for the other");
    let Fault::Deadlock(what) = &failure.fault else {
        panic!("{failure}");
    };
    assert!(
        what.contains("barrier 0") && what.contains("barrier 1"),
        "{what}"
    );
    let apart = "setp.lt.u32 %p1, %r0, 10; @%p1 bra A; bar.sync 0; bra.uni B; A: bar.sync 0; B: mov.u32 %r1, 0;";
    let failure = words(apart, 32).expect_err("one warp at two barriers");
    assert!(matches!(failure.fault, Fault::Undefined(_)), "{failure}");
    for wrong in ["bar.sync 16;", "bar.sync 0, 33;", "bar.sync %r0;"] {
        let failure = words(wrong, 96).expect_err("no such barrier");
        assert!(
            matches!(failure.fault, Fault::Undefined(_)),
            "{wrong}: {failure}"
        );
    }
    // A whole warp counts as 32 threads, even if some of its threads have exited.
    assert!(words("setp.gt.u32 %p1, %r0, 70; @%p1 exit; bar.sync 1, 96;", 128).is_ok());
}
