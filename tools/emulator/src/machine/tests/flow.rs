//! Tests of divergence and reconvergence.

use crate::machine::testing::{words, words_with};
use crate::machine::{Fault, Options};

const ALL: u32 = u32::MAX;

/// Loops of different lengths with `break` and `continue`, and nested branches.
#[test]
fn nested_ways_give_what_each_thread_alone_would_compute() {
    let body = "
        mov.u32 %r1, 0; mov.u32 %r2, 0;
        LOOP:
        setp.ge.u32 %p1, %r1, %r0; @%p1 bra DONE;
        setp.eq.u32 %p2, %r1, 20; @%p2 bra DONE;
        add.u32 %r1, %r1, 1;
        and.b32 %r3, %r1, 3; setp.eq.u32 %p3, %r3, 1; @%p3 bra LOOP;
        and.b32 %r4, %r0, 1; setp.eq.u32 %p4, %r4, 1; @%p4 bra ODD;
        setp.gt.u32 %p5, %r0, 16; @!%p5 bra SMALL;
        add.u32 %r2, %r2, 100;
        bra.uni NEXT;
        SMALL: add.u32 %r2, %r2, 10;
        bra.uni NEXT;
        ODD: @%p5 add.u32 %r2, %r2, 1000;
        add.u32 %r2, %r2, 1;
        NEXT: bra.uni LOOP;
        DONE: st.global.u32 [%d1], %r2;";
    let expected = |thread: u32| {
        let (mut turn, mut sum) = (0, 0);
        while turn < thread && turn != 20 {
            turn += 1;
            sum += match (turn % 4 == 1, thread % 2, thread > 16) {
                (true, ..) => 0,
                (_, 1, _) => 1,
                (_, _, true) => 100,
                _ => 10,
            };
        }
        sum
    };
    // `%p5` is never true on the path to `ODD`, so it is not computed there.
    let got = words(body, 64).expect("it runs");
    assert_eq!(got, (0..64).map(expected).collect::<Vec<_>>());
}

/// The block behind the end of the kernel is code that a compiler considered rare.
#[test]
fn lanes_meet_behind_a_branch_whatever_the_layout() {
    let body = "
        setp.lt.u32 %p1, %r0, 5; @%p1 bra RARE;
        BACK: activemask.b32 %r1; st.global.u32 [%d1], %r1; ret;
        RARE: setp.eq.u32 %p2, %r0, 2; @%p2 bra RARER;
        bra.uni BACK;
        RARER: mov.u32 %r2, 7; bra.uni BACK;";
    assert_eq!(words(body, 32), Ok(vec![ALL; 32]));
    assert_eq!(words(body, 31), Ok(vec![ALL >> 1; 31]));
}

#[test]
fn lanes_meet_behind_loops_and_not_in_them() {
    // Each lane leaves the loop with the mask of its last iteration. Behind the loop all lanes run together.
    let body = "
        mov.u32 %r1, 0;
        LOOP: activemask.b32 %r2;
        add.u32 %r1, %r1, 1;
        setp.le.u32 %p1, %r1, %r0; @%p1 bra LOOP;
        activemask.b32 %r3; sub.u32 %r4, %r3, %r2; st.global.u32 [%d1], %r4;";
    let expected = (0..32).map(|lane| ALL - (ALL << lane));
    assert_eq!(words(body, 32), Ok(expected.collect::<Vec<_>>()));
}

#[test]
fn a_long_loop_of_one_lane_does_not_part_the_others() {
    let body = "
        mul.lo.u32 %r1, %r0, 5000;
        LOOP: setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;
        sub.u32 %r1, %r1, 1; bra.uni LOOP;
        DONE: activemask.b32 %r3; st.global.u32 [%d1], %r3;";
    assert_eq!(words(body, 32), Ok(vec![ALL; 32]));
}

#[test]
fn lanes_that_end_are_not_waited_for() {
    let ended = |how: &str| {
        format!(
            "setp.ge.u32 %p1, %r0, 7; {how}
             activemask.b32 %r1; bar.sync 0; shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;
             st.global.u32 [%d1], %r2; END: ret;"
        )
    };
    for how in ["@%p1 bra END;", "@%p1 exit;", "@%p1 ret;"] {
        let got = words(&ended(how), 40).expect("it runs");
        assert_eq!(got[..7], [127; 7], "{how}");
        assert_eq!(got[7..], [0; 33], "{how}");
    }
}

#[test]
fn halves_of_a_warp_exchange_in_different_branches() {
    let body = "
        setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW;
        shfl.sync.down.b32 %r1, %r0, 1, 0x101f, 0xffff0000; bra.uni DONE;
        LOW: shfl.sync.up.b32 %r1, %r0, 1, 0, 0xffff;
        DONE: st.global.u32 [%d1], %r1;";
    let expected = (0..32).map(|lane: u32| match lane {
        0..16 => lane.saturating_sub(1),
        _ => (lane + 1).min(31),
    });
    assert_eq!(words(body, 32), Ok(expected.collect::<Vec<_>>()));
    // The same instruction, with a different mask for each half.
    let body = "
        setp.lt.u32 %p1, %r0, 16; selp.b32 %r1, 0xffff, 0xffff0000, %p1;
        shfl.sync.bfly.b32 %r2, %r0, 1, 31, %r1; st.global.u32 [%d1], %r2;";
    assert_eq!(
        words(body, 32),
        Ok((0..32).map(|lane| lane ^ 1).collect::<Vec<_>>())
    );
}

/// Lanes stop at an exchange until lanes on other paths have arrived.
#[test]
fn an_exchange_waits_for_lanes_that_come_late() {
    // The path from LATE to HERE leads backwards, and no branch makes the lanes reconverge before it.
    let body = "
        mov.u32 %r1, 0;
        setp.lt.u32 %p1, %r0, 3;
        @%p1 bra LATE;
        HERE: shfl.sync.idx.b32 %r2, %r0, 1, 31, -1;
        add.u32 %r2, %r2, %r1; st.global.u32 [%d1], %r2; ret;
        LATE: mov.u32 %r1, 100; bra.uni HERE;";
    let expected = (0..32).map(|lane| if lane < 3 { 101 } else { 1 });
    assert_eq!(words(body, 32), Ok(expected.collect::<Vec<_>>()));
}

#[test]
fn lanes_that_never_come_are_told_of() {
    let body = "
        setp.lt.u32 %p1, %r0, 3;
        @%p1 shfl.sync.idx.b32 %r2, %r0, 1, 31, -1;
        L: bra.uni L;";
    let options = Options {
        budget: 1 << 16,
        ..Options::default()
    };
    let fault = words_with(body, 1, 32, options)
        .expect_err("lanes wait")
        .fault;
    assert_eq!(
        std::mem::discriminant(&fault),
        std::mem::discriminant(&Fault::Endless(0))
    );
    let body = "
        setp.lt.u32 %p1, %r0, 3; @!%p1 bra OTHERS;
        shfl.sync.idx.b32 %r2, %r0, 1, 31, -1; ret;
        OTHERS: shfl.sync.idx.b32 %r2, %r0, 1, 31, -1;";
    let failure = words(body, 32).expect_err("no lane comes to where the others are");
    assert!(matches!(failure.fault, Fault::Deadlock(_)), "{failure}");
    assert!(failure.place.instruction.starts_with("shfl"), "{failure}");
    let foreign = words("shfl.sync.idx.b32 %r2, %r0, 1, 31, 0xff;", 32);
    assert!(matches!(
        foreign.expect_err("not in the mask").fault,
        Fault::Undefined(_)
    ));
}

#[test]
fn warps_wait_for_their_lanes_at_any_instruction() {
    // Each half observes the stores of the other half only with a `bar.warp.sync` between them.
    let body = "
        .shared .align 4 .b8 s[128];
        mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2;
        st.shared.u32 [%r3], 0;
        xor.b32 %r4, %r3, 64;
        setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW;
        st.shared.u32 [%r3], %r0; bar.warp.sync -1; ld.shared.u32 %r5, [%r4]; bra.uni DONE;
        LOW: st.shared.u32 [%r3], %r0; bar.warp.sync 0xffffffff; ld.shared.u32 %r5, [%r4];
        DONE: st.global.u32 [%d1], %r5;";
    assert_eq!(
        words(body, 32),
        Ok((0..32).map(|lane| lane ^ 16).collect::<Vec<_>>())
    );
}

#[test]
fn warps_do_not_wait_for_lanes_that_have_ended() {
    let body = "
        setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW;
        setp.eq.u32 %p2, %r0, 31; @%p2 exit;
        bar.warp.sync -1; bra.uni DONE;
        LOW: bar.warp.sync -1;
        DONE: st.global.u32 [%d1], 1;";
    assert_eq!(words(body, 32).map(|words| words.iter().sum()), Ok(31));
    assert_eq!(words(body, 20), Ok(vec![1; 20]));
    // These lanes exit while the others are already waiting.
    let body = "
        setp.ge.u32 %p1, %r0, 4; @%p1 bra OTHERS;
        shfl.sync.idx.b32 %r1, %r0, 3, 31, -1; st.global.u32 [%d1], %r1; ret;
        OTHERS: mov.u32 %r1, 1; exit;";
    assert_eq!(words(body, 6), Ok(vec![3, 3, 3, 3, 0, 0]));
}

/// Every lane takes the same lock in turn. The lane that holds the lock is behind the point where the others wait.
#[test]
fn lanes_that_fight_for_a_lock_all_get_it() {
    let spin = |pause: &str| {
        format!(
            ".shared .align 4 .b8 s[8];
             st.shared.u32 [s], 0; st.shared.u32 [s+4], 0; bar.sync 0;
             SPIN: atom.shared.cas.b32 %r1, [s], 0, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra GOT;
             {pause} bra.uni SPIN;
             GOT: ld.shared.u32 %r2, [s+4]; add.u32 %r3, %r2, 1; st.shared.u32 [s+4], %r3;
             atom.shared.exch.b32 %r4, [s], 0;
             st.global.u32 [%d1], %r2;"
        )
    };
    for pause in ["", "nanosleep.u32 20;"] {
        let mut got = words(&spin(pause), 96).expect("each gets it");
        got.sort_unstable();
        assert_eq!(got, (0..96).collect::<Vec<_>>(), "{pause}");
    }
}

#[test]
fn a_table_of_branches() {
    let body = "
        and.b32 %r1, %r0, 3;
        TABLE: .branchtargets A, B, C, B;
        brx.idx %r1, TABLE;
        A: mov.u32 %r2, 10; bra.uni DONE;
        B: mov.u32 %r2, 20; bra.uni DONE;
        C: mov.u32 %r2, 30;
        DONE: activemask.b32 %r3; not.b32 %r3, %r3; add.u32 %r2, %r2, %r3;
        st.global.u32 [%d1], %r2;";
    let expected = (0..32).map(|lane| [10, 20, 30, 20][lane % 4]);
    assert_eq!(words(body, 32), Ok(expected.collect::<Vec<_>>()));
}

#[test]
fn an_endless_loop_ends() {
    let options = Options {
        budget: 100_000,
        ..Options::default()
    };
    let failure = words_with("L: bra.uni L;", 1, 64, options).expect_err("it has no end");
    assert!(
        matches!(failure.fault, Fault::Endless(count) if count < 200_000),
        "{failure}"
    );
}
