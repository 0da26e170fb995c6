use crate::machine::Fault;
use crate::machine::testing::words;

/// Runs one warp. Returns `%r1` of each lane, plus 1000 if `%p1` is true.
fn run(body: &str) -> Vec<u32> {
    let text = format!("{body} @%p1 add.u32 %r1, %r1, 1000; st.global.u32 [%d1], %r1;");
    words(&text, 32).expect("it runs")
}

/// Computes the definition of the specification, with its names.
fn specified(mode: &str, lane: i32, b: i32, c: i32) -> (i32, bool) {
    let (bval, cval, mask) = (b & 31, c & 31, c >> 8 & 31);
    let max_lane = lane & mask | cval & !mask;
    let min_lane = lane & mask;
    let (j, within) = match mode {
        "up" => (lane - bval, lane - bval >= max_lane),
        "down" => (lane + bval, lane + bval <= max_lane),
        "bfly" => (lane ^ bval, lane ^ bval <= max_lane),
        _ => {
            let j = min_lane | bval & !mask;
            (j, j <= max_lane)
        }
    };
    (if within { j } else { lane }, within)
}

#[test]
fn shuffles_of_all_modes_and_segments() {
    for mode in ["up", "down", "bfly", "idx"] {
        for by in [0, 1, 3, 8, 16, 31, 37] {
            for limits in [0, 31, 0x101f, 0x181f, 0x1c1f, 0x1800, 0x0007, 0x1e01] {
                let got = run(&format!(
                    "add.u32 %r2, %r0, 100; shfl.sync.{mode}.b32 %r1|%p1, %r2, {by}, {limits}, -1;"
                ));
                let expected = (0..32).map(|lane| {
                    let (from, within) = specified(mode, lane, by, limits);
                    (100 + from + if within { 1000 } else { 0 }) as u32
                });
                assert_eq!(got, expected.collect::<Vec<_>>(), "{mode} {by} {limits:#x}");
            }
        }
    }
    // Operands may differ between lanes, and the source may be the target.
    let got = run(
        "mov.u32 %r1, %r0; sub.u32 %r2, 31, %r0; setp.ne.u32 %p1, %r0, %r0;
        shfl.sync.idx.b32 %r1, %r1, %r2, 31, -1;",
    );
    assert_eq!(got, (0..32).rev().collect::<Vec<_>>());
}

#[test]
fn only_members_can_be_read() {
    let from = |lane: u32| {
        let text =
            format!("setp.lt.u32 %p1, %r0, 8; @%p1 shfl.sync.idx.b32 %r1, %r0, {lane}, 31, 0xff;");
        words(&text, 32)
    };
    assert!(from(7).is_ok());
    let fault = from(8).expect_err("lane 8 is not here").fault;
    assert!(matches!(fault, Fault::Undefined(_)), "{fault}");
}

#[test]
fn votes() {
    let vote = |text: &str| run(&format!("setp.lt.u32 %p2, %r0, 5; mov.u32 %r1, 0; {text}"));
    let none = "setp.ne.u32 %p1, %r0, %r0; ";
    let ballot = |text: &str| vote(&format!("{none}{text}"));
    assert_eq!(ballot("vote.sync.ballot.b32 %r1, %p2, -1;"), [31; 32]);
    assert_eq!(
        ballot("vote.sync.ballot.b32 %r1, !%p2, -1; shr.u32 %r1, %r1, 5;"),
        [(1 << 27) - 1; 32]
    );
    assert_eq!(
        ballot("vote.sync.ballot.b32 %r1, 1, -1; not.b32 %r1, %r1;"),
        [0; 32]
    );
    assert_eq!(vote("vote.sync.any.pred %p1, %p2, -1;"), [1000; 32]);
    assert_eq!(vote("vote.sync.all.pred %p1, %p2, -1;"), [0; 32]);
    assert_eq!(vote("vote.sync.uni.pred %p1, %p2, -1;"), [0; 32]);
    // Only the first five lanes vote, and all of them vote yes. The predicate of the other lanes is unchanged.
    let five = "@%p2 vote.sync.all.pred %p1, %p2, 31;";
    let expected = (0..32).map(|lane| if lane < 5 { 1000 } else { 0 });
    assert_eq!(vote(&format!("{none}{five}")), expected.collect::<Vec<_>>());
    assert_eq!(
        vote(&format!("{none} @%p2 vote.sync.uni.pred %p1, !%p2, 31;"))[..6],
        [1000, 1000, 1000, 1000, 1000, 0]
    );
}

#[test]
fn lanes_with_the_same_value() {
    let none = "setp.ne.u32 %p1, %r0, %r0; ";
    let got = run(&format!(
        "{none} and.b32 %r2, %r0, 3; match.any.sync.b32 %r1, %r2, -1;"
    ));
    let expected = (0..32).map(|lane: u32| 0x1111_1111 << (lane % 4));
    assert_eq!(got, expected.collect::<Vec<_>>());
    let got = run("mov.u64 %d2, 5; match.all.sync.b64 %r1|%p1, %d2, -1; not.b32 %r1, %r1;");
    assert_eq!(got, [1000; 32]);
    let got = run("match.all.sync.b32 %r1|%p1, %r0, -1;");
    assert_eq!(got, [0; 32]);
}

#[test]
fn reductions_of_a_warp() {
    let reduce = |text: &str| {
        let got = run(&format!(
            "setp.ne.u32 %p1, %r0, %r0; sub.u32 %r2, %r0, 16; redux.sync.{text} %r1, %r2, -1;"
        ));
        assert!(got.iter().all(|value| *value == got[0]), "{text}");
        got[0]
    };
    let values = || (0..32u32).map(|lane| lane.wrapping_sub(16));
    assert_eq!(reduce("add.s32"), values().fold(0, u32::wrapping_add));
    assert_eq!(Some(reduce("min.u32")), values().min());
    assert_eq!(Some(reduce("max.u32")), values().max());
    assert_eq!(reduce("min.s32") as i32, -16);
    assert_eq!(reduce("max.s32"), 15);
    assert_eq!(reduce("and.b32"), 0);
    assert_eq!(reduce("or.b32"), u32::MAX);
    assert_eq!(reduce("xor.b32"), values().fold(0, |a, b| a ^ b));
    let floats = |text: &str, first: u32| {
        run(&format!(
            "setp.ne.u32 %p1, %r0, %r0; mov.b32 %r2, 0xbf800000; setp.eq.u32 %p2, %r0, 3;
             selp.b32 %r2, {first}, %r2, %p2; redux.sync.{text}.f32 %r1, %r2, -1;"
        ))[0]
    };
    let (one, minus_one, nan) = (1f32.to_bits(), (-1f32).to_bits(), 0x7fff_ffff);
    assert_eq!(floats("min", one), minus_one);
    assert_eq!(floats("max", one), one);
    assert_eq!(floats("max.abs", 0), one);
    assert_eq!(floats("min", nan), minus_one);
    assert_eq!(floats("max.NaN", nan), nan);
}

#[test]
fn the_lowest_lane_is_elected() {
    let got = run(
        "setp.ne.u32 %p1, %r0, %r0; mov.u32 %r1, 99; setp.ge.u32 %p2, %r0, 6;
        @%p2 elect.sync %r1|%p1, 0xffffffc0;",
    );
    assert_eq!(got[..8], [99, 99, 99, 99, 99, 99, 1006, 6]);
}
