//! Tests of errors that a GPU does not report.

use crate::machine::testing::words_with;
use crate::machine::{Checks, Fault, Options};

const NONE: Checks = Checks {
    races: false,
    lanes: false,
    unwritten: false,
    conflicts: false,
};

/// `%r2` is the address of the thread's word in 1024 bytes of shared memory. `%r3` is the address of the word 32
/// threads further on, with wrap-around. There are 256 threads.
const SHARED: &str = "
    .shared .align 16 .b8 s[1024];
    mov.u32 %r1, s; shl.b32 %r2, %r0, 2; add.u32 %r3, %r2, 128; and.b32 %r3, %r3, 1023;
    add.u32 %r2, %r1, %r2; add.u32 %r3, %r1, %r3;\n";

fn fault(body: &str, checks: Checks) -> Option<Fault> {
    let options = Options {
        checks,
        ..Options::default()
    };
    let ran = words_with(&format!("{SHARED}{body}"), 1, 256, options);
    ran.err().map(|failure| failure.fault)
}

fn races(body: &str) -> bool {
    let found = fault(
        body,
        Checks {
            races: true,
            ..NONE
        },
    );
    assert_eq!(fault(body, NONE), None);
    assert!(matches!(found, None | Some(Fault::Race(_))), "{found:?}");
    found.is_some()
}

#[test]
fn races_of_warps() {
    let (write, read) = ("st.shared.u32 [%r2], %r0;", "ld.shared.u32 %r4, [%r3];");
    let barrier = "bar.sync 0;";
    assert!(races(&[write, read].concat()), "read behind write");
    assert!(races(&[read, write].concat()), "write behind read");
    assert!(
        races(&[write, "st.shared.u32 [%r3], %r0;"].concat()),
        "write behind write"
    );
    assert!(
        races(&[write, barrier, read, write].concat()),
        "the second barrier is missing"
    );
    assert!(!races(&[write, barrier, read, barrier, write].concat()));
    assert!(
        !races("st.shared.u32 [%r2], 0; ld.shared.u32 %r4, [%r2];"),
        "their own"
    );
    assert!(
        !races("ld.shared.u32 %r4, [%r2]; ld.shared.u32 %r4, [%r3];"),
        "only read"
    );
    assert!(!races(
        "red.shared.add.u32 [s], 1; atom.shared.add.u32 %r4, [s], 1;"
    ));
    let last = "ld.shared.u32 %r4, [s]; setp.ge.u32 %p1, %r0, 224; @%p1 st.shared.u32 [s], 1;";
    assert!(races(last), "all have read what the last one writes");
    assert!(races("red.shared.add.u32 [s], 1; ld.shared.u32 %r4, [s];"));
    assert!(races("ld.shared.u32 %r4, [s]; red.shared.add.u32 [s], 1;"));
    let generic = "cvt.u64.u32 %d2, %r3; cvta.shared.u64 %d3, %d2; ld.u32 %r4, [%d3];";
    assert!(races(&[write, generic].concat()));
    assert!(!races(&[write, barrier, generic].concat()));
}

#[test]
fn a_race_names_both_instructions() {
    let body = "st.shared.u32 [%r2], %r0;\nld.shared.u32 %r4, [%r3];";
    let options = Options {
        checks: Checks {
            races: true,
            ..NONE
        },
        ..Options::default()
    };
    let ran = words_with(&format!("{SHARED}{body}"), 1, 256, options);
    let failure = ran.expect_err("a race");
    let Fault::Race(what) = &failure.fault else {
        panic!("{failure}");
    };
    // The first warp has read the word when the second warp stores to it.
    let line = failure.place.line + 1;
    assert!(
        what.contains(&format!("ld.shared.u32 at line {line} reads")),
        "{what}"
    );
    assert_eq!(failure.place.instruction, "st.shared.u32");
    assert_eq!(failure.place.warp, 1);
}

/// Warps may share words if each warp uses different bytes.
#[test]
fn races_are_told_by_the_byte() {
    let bytes = |offset: u32| {
        format!(
            "st.shared.u32 [%r2], 0; bar.sync 0;
             shr.u32 %r5, %r0, 5; and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 3; add.u32 %r6, %r6, %r5;
             cvt.u16.u32 %h1, %r0; add.u32 %r6, %r6, %r1; st.shared.u8 [%r6], %h1;
             ld.shared.u8 %h2, [%r6+{offset}];"
        )
    };
    assert!(!races(&bytes(0)));
    assert!(races(&bytes(1)));
    let wide = "and.b32 %r5, %r0, 15; shl.b32 %r5, %r5, 4; add.u32 %r5, %r5, %r1;
        ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r5];";
    assert!(!races(wide));
    assert!(races(&format!("{wide} st.shared.u32 [%r2], 0;")));
}

/// Warps that synchronize by other means are not reported.
#[test]
fn races_are_not_looked_for_where_order_is_not_followed() {
    let race = "st.shared.u32 [%r2], %r0; ld.shared.u32 %r4, [%r3];";
    assert!(races(race));
    assert!(!races(
        &format!("bar.sync 1, 256; bar.sync 2, 256; {race}").replace(race, "")
    ));
    assert!(races(&format!("bar.sync 1, 256; {race}")), "256 are all");
    assert!(!races(&format!(
        "shr.u32 %r9, %r0, 7; add.u32 %r9, %r9, 1; bar.sync %r9, 128; {race}"
    )));
    assert!(!races(&format!(
        "{race} ld.volatile.shared.u32 %r4, [%r2];"
    )));
    assert!(!races(&format!(
        "{race} atom.shared.cas.b32 %r4, [%r2], 0, 0;"
    )));
}

#[test]
fn races_of_lanes() {
    let lanes = Checks {
        lanes: true,
        races: true,
        ..NONE
    };
    let found = |body: &str| {
        let fault = fault(body, lanes);
        assert!(matches!(fault, None | Some(Fault::Race(_))), "{fault:?}");
        fault.is_some()
    };
    let neighbour = "xor.b32 %r4, %r2, 4; ld.shared.u32 %r5, [%r4];";
    let store = "st.shared.u32 [%r2], %r0;";
    assert!(found(&[store, neighbour].concat()));
    assert!(found(&[neighbour, store].concat()));
    for between in [
        "bar.warp.sync -1;",
        "bar.sync 0;",
        "shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;",
    ] {
        assert!(
            !found(&[store, between, neighbour, between, store].concat()),
            "{between}"
        );
        assert!(
            found(&[store, between, neighbour, store].concat()),
            "{between}"
        );
    }
    assert!(
        !found(&[store, "ld.shared.u32 %r5, [%r2];", store].concat()),
        "their own"
    );
    let all_read = "shr.u32 %r4, %r0, 5; shl.b32 %r4, %r4, 7; add.u32 %r4, %r4, %r1;
        ld.shared.u32 %r5, [%r4]; ";
    assert!(!found(&[store, "bar.warp.sync -1;", all_read].concat()));
    assert!(
        found(&[store, "bar.warp.sync -1;", all_read, store].concat()),
        "many have read"
    );
}

#[test]
fn shared_memory_that_nothing_has_written() {
    let unwritten = Checks {
        unwritten: true,
        ..NONE
    };
    let found = |body: &str| {
        let fault = fault(body, unwritten);
        assert!(
            matches!(fault, None | Some(Fault::Unwritten { .. })),
            "{fault:?}"
        );
        fault.is_some()
    };
    assert!(found("ld.shared.u32 %r4, [%r2];"));
    assert!(found("red.shared.add.u32 [%r2], 1;"));
    assert!(!found(
        "st.shared.u32 [%r2], 1; red.shared.add.u32 [%r2], 1; ld.shared.u32 %r4, [%r2];"
    ));
    assert!(
        found("st.shared.u16 [%r2+2], 1; ld.shared.u32 %r4, [%r2];"),
        "half of it"
    );
    assert!(!found(
        "st.shared.u16 [%r2+2], 1; ld.shared.u16 %h4, [%r2+2];"
    ));
    // Writes of the previous block do not count.
    let body = "mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0;
        @%p1 st.shared.u32 [%r2], 1; ld.shared.u32 %r4, [%r2];";
    let options = Options {
        checks: unwritten,
        ..Options::default()
    };
    let failure = words_with(&format!("{SHARED}{body}"), 2, 256, options);
    assert_eq!(failure.expect_err("not written").place.block, [1, 0, 0]);
}

#[test]
fn stores_that_contradict_each_other() {
    let found = |body: &str, blocks| {
        let checks = Checks {
            conflicts: true,
            ..NONE
        };
        let ran = words_with(
            body,
            blocks,
            64,
            Options {
                checks,
                ..Options::default()
            },
        );
        let fault = ran.err().map(|failure| failure.fault);
        assert!(matches!(fault, None | Some(Fault::Race(_))), "{fault:?}");
        fault.is_some()
    };
    let block = "mov.u32 %r1, %ctaid.x; ";
    assert!(found(&format!("{block} st.global.u32 [%d1], %r1;"), 2));
    assert!(!found(&format!("{block} st.global.u32 [%d1], %r1;"), 1));
    assert!(!found("st.global.u32 [%d1], %r0;", 3), "all the same");
    assert!(found("st.global.u32 [%data], %r0;", 1), "two warps");
    let ordered = "st.global.u32 [%d1], 1; bar.sync 0; xor.b32 %r2, %r0, 32;
        mul.wide.u32 %d2, %r2, 4; add.s64 %d2, %data, %d2; st.global.u32 [%d2], 2;";
    assert!(!found(ordered, 1));
    assert!(found(&ordered.replace("bar.sync 0;", ""), 1));
    assert!(!found("red.global.add.u32 [%data], %r0;", 3), "atomics");
}
