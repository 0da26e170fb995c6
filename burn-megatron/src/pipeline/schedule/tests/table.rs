//! Reading and writing schedules.

use proptest::prelude::*;

use super::super::{Action, ActionKind, Schedule, ScheduleKind, validate};
use super::{computations, schedule};

#[test]
fn actions_are_read_as_they_are_written() {
    for kind in ActionKind::ALL.iter().copied() {
        let action = Action::new(kind, 2, 15);
        let written = action.to_string();
        if kind == ActionKind::ReduceGradients {
            assert_eq!(written, "RG 2");
            assert_eq!(written.parse(), Ok(Action::reduce_gradients(2)));
            continue;
        }
        assert_eq!(written, format!("{} 2 15", kind.code()));
        assert_eq!(written.parse(), Ok(action));
        assert_eq!(kind.is_compute(), kind.is_forward() || written.len() == 6);
        assert_ne!(kind.is_compute(), kind.is_transfer());
    }
    for text in [
        "", "F", "F 1", "F 1 2 3", "X 1 2", "f 1 2", "F -1 2", "F 1 2.0", "F1 2", "RG", "RG 1 2",
    ] {
        assert!(text.parse::<Action>().is_err(), "{text}");
    }
}

#[test]
fn a_send_and_its_receive_name_each_other() {
    let other = |text: &str| {
        let action: Action = text.parse().expect("action");
        action.counterpart().map(|other| other.to_string())
    };
    assert_eq!(other("SF 1 4").as_deref(), Some("RF 2 4"));
    assert_eq!(other("RF 2 4").as_deref(), Some("SF 1 4"));
    assert_eq!(other("SB 2 4").as_deref(), Some("RB 1 4"));
    assert_eq!(other("RB 1 4").as_deref(), Some("SB 2 4"));
    for none in [
        "F 1 4", "B 1 4", "I 1 4", "W 1 4", "RF 0 4", "SB 0 4", "RG 1",
    ] {
        assert_eq!(other(none), None);
    }
}

#[test]
fn schedules_are_read_as_they_are_written() {
    for kind in ScheduleKind::ALL {
        for (p, m) in [(1, 1), (2, 4), (4, 8), (3, 6)] {
            let written = schedule(kind, p, m);
            let read = Schedule::from_csv(written.name(), &written.to_csv()).expect("readable");
            assert_eq!(read, written);
            // A table without sends and receives gets the same transfers, with or without reductions.
            let bare = csv_of(&written, |kind| !kind.is_transfer());
            let read = Schedule::from_csv(written.name(), &bare).expect("readable");
            assert_eq!(read, written);
            let bare = csv_of(&written, ActionKind::is_compute);
            let read = Schedule::from_csv(written.name(), &bare).expect("readable");
            assert_eq!(read, written.with_reduce_gradients());
        }
    }
}

/// Returns the actions of some kinds as CSV.
fn csv_of(schedule: &Schedule, keep: fn(ActionKind) -> bool) -> String {
    let rows = (0..schedule.ranks()).map(|rank| {
        let kept = schedule.actions(rank).iter().filter(|one| keep(one.kind));
        let cells: Vec<_> = kept.map(Action::to_string).collect();
        cells.join(",")
    });
    rows.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_table_from_a_spreadsheet() {
    let text =
        "\u{feff}# two ranks\r\n\r\n F 0 0 ,, F  0 1,B 0 0,B 0 1,,\r\n,F 1 0,B 1 0,F 1 1,B 1 1";
    let schedule = Schedule::from_csv("mine", text).expect("readable");
    assert_eq!((schedule.name(), schedule.ranks()), ("mine", 2));
    assert_eq!((schedule.stages(), schedule.micro_batches()), (2, 2));
    assert_eq!(computations(&schedule, 0).len(), 4);
    validate(&schedule).expect("valid");
}

#[test]
fn errors_name_row_column_and_text() {
    let cases = [
        ("", "row 1, column 1: the table has no actions"),
        (
            "F 0 0,B 0 0\n,,\n",
            "row 2, column 1: the row has no actions",
        ),
        (
            "F 0 0,B 0 0\n\nF 1 0,Q 1 0",
            "row 3, column 2: invalid action \"Q 1 0\": expected a kind (F, B, I, W, SF, RF, SB or RB)",
        ),
        (
            "F 0 0,B 0 0\nF 1 0,B 0 1",
            "row 2, column 2: \"B 0 1\" has stage 0 on rank 1, but row 1 has it too",
        ),
        (
            "F 0 0,B 0 0\nF 2 0,B 2 0",
            "row 2, column 1: \"F 2 0\" has stage 2, but no cell has stage 1: number them from 0",
        ),
        (
            "F 0 1,B 0 1",
            "row 1, column 1: \"F 0 1\" has micro-batch 1, but no cell has micro-batch 0",
        ),
        // A reduction has no micro-batch that could fill the gap.
        (
            "F 0 1,RG 0,B 0 1",
            "row 1, column 1: \"F 0 1\" has micro-batch 1, but no cell has micro-batch 0",
        ),
        (
            "F 0 0,B 0 0\nRG 0,F 1 0,B 1 0",
            "row 2, column 1: \"RG 0\" has stage 0 on rank 1, but row 1 has it too",
        ),
        (
            "F 0 18446744073709551615",
            "row 1, column 1: \"F 0 18446744073709551615\" has micro-batch",
        ),
        (
            "F 0 0,B 0 0\nB 1 0,F 1 0",
            "rank 1, action 1 of 2, \"B 1 0\" (backward of stage 1, micro-batch 0): it needs \
             \"F 1 0\" (forward of stage 1, micro-batch 0) before it",
        ),
    ];
    for (text, expected) in cases {
        let message = Schedule::from_csv("", text).expect_err(text).to_string();
        assert!(message.starts_with(expected), "{message}");
    }
}

/// Each rank waits for a tensor that the other computes later, with any order of sends.
#[test]
fn a_table_whose_ranks_deadlock() {
    let text = "F 0 0,F 0 1,B 0 1,B 0 0\nF 1 0,B 1 0,F 1 1,B 1 1";
    Schedule::from_csv("", text).expect("only the order of the gradients differs");
    let text = "F 0 0,B 0 0,F 0 1,B 0 1\nF 1 1,B 1 1,F 1 0,B 1 0";
    let message = Schedule::from_csv("", text)
        .expect_err("a cycle")
        .to_string();
    insta::assert_snapshot!(
        message,
        @"rank 0, action 2 of 4, \"B 0 0\" (backward of stage 0, micro-batch 0): rank 0 waits in \
          \"RB 0 0\" for rank 1, which waits in \"RF 1 1\" for rank 0"
    );
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in "([FBIWSR]{1,2} [0-3] [0-3][,\n]{1,2}|RG [0-3][,\n]{1,2}|.){0,30}") {
        if let Ok(schedule) = Schedule::from_csv("", &text) {
            let again = Schedule::from_csv("", &schedule.to_csv());
            prop_assert_eq!(again.expect("readable"), schedule);
        }
    }
}
