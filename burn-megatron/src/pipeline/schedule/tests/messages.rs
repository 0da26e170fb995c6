//! Error messages, and names in files.

use insta::assert_snapshot;
use serde::{Deserialize, Serialize};

use super::super::{RuleViolation, ScheduleConfig, ScheduleKind, StageTimes, simulate, validate};
use super::super::{Schedule, generate};
use super::{INTERLEAVED, schedule};

fn refusal(config: &ScheduleConfig) -> String {
    generate(config).expect_err("refused").to_string()
}

fn grouped(ranks: usize, micro_batches: usize, group: usize) -> ScheduleConfig {
    let kind = ScheduleKind::Interleaved { group: Some(group) };
    ScheduleConfig::new(kind, ranks, micro_batches)
}

#[test]
fn groups_that_do_not_run() {
    assert_snapshot!(
        refusal(&ScheduleConfig::new(INTERLEAVED, 4, 5)),
        @"interleaved over 4 stages cannot run 5 micro-batches in groups of 4: use a group of 5, or \
          4 or 8 micro-batches"
    );
    let fits = |ranks, micro_batches, group| {
        let message = refusal(&grouped(ranks, micro_batches, group));
        message
            .split_once(": use ")
            .expect("an offer")
            .1
            .to_string()
    };
    assert_snapshot!(fits(4, 3, 4), @"4 micro-batches");
    assert_snapshot!(fits(4, 8, 9), @"a group of 8, or 9 micro-batches");
    assert_snapshot!(fits(4, 8, 3), @"a group of 4");
    assert_snapshot!(fits(4, 3, 2), @"a group of 4 and 4 micro-batches or a multiple");
    assert_snapshot!(fits(4, 10, 8), @"a group of 6 or 10, or 8 or 12 micro-batches");
    assert_snapshot!(fits(4, 8, 0), @"a group of 4");
    assert_snapshot!(fits(4, 8, usize::MAX), @"a group of 8");
}

/// The sizes that a message suggests are valid.
#[test]
fn the_offered_sizes_fit() {
    for ranks in 1..6 {
        for micro_batches in 1..14 {
            for group in 1..16 {
                let config = grouped(ranks, micro_batches, group);
                let Err(error) = generate(&config) else {
                    continue;
                };
                let message = error.to_string();
                let fits = message.split_once(": use ").expect("an offer").1;
                let numbers = |text: &str| -> Vec<usize> {
                    text.split(' ')
                        .filter_map(|word| word.parse().ok())
                        .collect()
                };
                let (groups, counts) = match fits.split_once(", or ") {
                    Some((groups, counts)) => (numbers(groups), numbers(counts)),
                    None if fits.contains(" and ") => {
                        generate(&grouped(ranks, ranks, ranks)).expect("offered");
                        continue;
                    }
                    None if fits.starts_with("a group") => (numbers(fits), vec![]),
                    None => (vec![], numbers(fits)),
                };
                assert!(!groups.is_empty() || !counts.is_empty(), "{message}");
                for group in groups {
                    generate(&grouped(ranks, micro_batches, group)).expect(&message);
                }
                for count in counts {
                    generate(&grouped(ranks, count, group)).expect(&message);
                }
            }
        }
    }
}

#[test]
fn sizes_that_no_schedule_has() {
    let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 4, 8);
    assert_snapshot!(
        refusal(&config.with_virtual_stages(2)),
        @"1f1b does not support 2 virtual stages per rank: use 1, or interleaved"
    );
    let config = ScheduleConfig::new(INTERLEAVED, 4, 8);
    assert_snapshot!(
        refusal(&config.with_virtual_stages(1)),
        @"interleaved does not support 1 virtual stages per rank: use 2 or more, or 1f1b"
    );
    let config = ScheduleConfig::new(ScheduleKind::ZbV, 4, 8);
    assert_snapshot!(
        refusal(&config.with_virtual_stages(1)),
        @"zb-v does not support 1 virtual stages per rank: use 2, or zb-h1"
    );
    for kind in ScheduleKind::ALL {
        let zero = [
            (ScheduleConfig::new(kind, 0, 8), "ranks"),
            (ScheduleConfig::new(kind, 4, 0), "micro-batches"),
            (
                ScheduleConfig::new(kind, 4, 8).with_virtual_stages(0),
                "virtual stages",
            ),
        ];
        for (config, what) in zero {
            let message = format!("invalid number of {what} 0: a schedule needs at least 1");
            assert_eq!(refusal(&config), message);
        }
        for huge in [1 << 24, usize::MAX] {
            let message = refusal(&ScheduleConfig::new(kind, huge, 8));
            assert!(
                message.contains("more than 16777216 computations"),
                "{message}"
            );
            let message = refusal(&ScheduleConfig::new(kind, 2, huge));
            assert!(message.contains("use fewer micro-batches"), "{message}");
        }
    }
}

#[test]
fn names() {
    for kind in ScheduleKind::ALL.into_iter().chain([grouped(1, 1, 6).kind]) {
        assert_eq!(
            kind.to_string().parse::<ScheduleKind>().expect("a name"),
            kind
        );
    }
    assert_eq!(grouped(1, 1, 6).kind.to_string(), "interleaved:6");
    for name in [
        "",
        "1F1B",
        "interleaved:",
        "interleaved:0",
        "interleaved:x",
        "dualpipe",
    ] {
        let message = name.parse::<ScheduleKind>().expect_err(name).to_string();
        assert!(message.contains(&format!("invalid schedule \"{name}\": expected gpipe")));
    }
}

#[test]
fn configurations_in_files() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct File {
        pipeline: ScheduleConfig,
    }
    let file = File {
        pipeline: grouped(4, 8, 6),
    };
    let text = "[pipeline]\nkind = \"interleaved:6\"\nranks = 4\nvirtual_stages = 2\n\
                micro_batches = 8\n";
    assert_eq!(toml::to_string(&file).expect("writable"), text);
    assert_eq!(toml::from_str::<File>(text).expect("readable"), file);
    assert!(toml::from_str::<File>(&text.replace("interleaved:6", "zb-h2")).is_err());
}

/// Returns the first invalid action of a schedule after a change of one of its lists.
fn message(change: impl Fn(&mut Vec<Vec<super::Action>>)) -> String {
    let mut schedule = schedule(ScheduleKind::OneFOneB, 2, 2);
    change(&mut schedule.ranks);
    validate(&schedule).expect_err("changed").to_string()
}

#[test]
fn the_first_wrong_action() {
    let action = |text: &str| text.parse().expect("an action");
    assert_snapshot!(
        message(|ranks| ranks[1][0] = action("RF 2 0")),
        @"rank 1, action 1 of 9, \"RF 2 0\" (receiving the activation of stage 2, micro-batch 0): \
          out of range for 2 stages and 2 micro-batches, both counted from 0"
    );
    assert_snapshot!(
        message(|ranks| ranks[1][0] = action("F 0 1")),
        @"rank 1, action 1 of 9, \"F 0 1\" (forward of stage 0, micro-batch 1): the stage is on \
          rank 0"
    );
    assert_snapshot!(
        message(|ranks| ranks[0].insert(1, action("RF 0 0"))),
        @"rank 0, action 2 of 10, \"RF 0 0\" (receiving the activation of stage 0, micro-batch 0): \
          both stages are on this rank, or one does not exist: nothing to send or receive"
    );
    assert_snapshot!(
        message(|ranks| ranks[0].push(action("W 0 0"))),
        @"rank 0, action 10 of 10, \"W 0 0\" (weight gradient of stage 0, micro-batch 0): already \
          done by \"B 0 0\", action 7 of the rank"
    );
    assert_snapshot!(
        message(|ranks| {
            ranks[1].remove(0);
        }),
        @"rank 1, action 1 of 8, \"F 1 0\" (forward of stage 1, micro-batch 0): it needs \"RF 1 0\" \
          (receiving the activation of stage 1, micro-batch 0) before it"
    );
    assert_snapshot!(
        message(|ranks| {
            ranks[0].pop();
        }),
        @"rank 0 ends after 8 actions without \"B 0 1\" (backward of stage 0, micro-batch 1)"
    );
    // Violations are ordered by position, then by rank.
    let first = message(|ranks| {
        ranks[0].remove(2);
        ranks[1].remove(0);
    });
    assert!(first.starts_with("rank 1, action 1 of 8"), "{first}");
    let first = message(|ranks| {
        ranks[0][0] = action("F 1 0");
        ranks[1][0] = action("F 0 0");
    });
    assert!(first.starts_with("rank 0, action 1 of 9"), "{first}");
    // Both ranks send before they receive, as 1F1B would in its plain order.
    assert_snapshot!(
        message(|ranks| ranks[1].swap(3, 4)),
        @"rank 0, action 5 of 9, \"SF 0 1\" (sending the activation of stage 0, micro-batch 1): \
          rank 0 waits in \"SF 0 1\" for rank 1, which waits in \"SB 1 0\" for rank 0"
    );
}

#[test]
fn an_error_can_be_taken_apart() {
    let mut schedule = schedule(ScheduleKind::OneFOneB, 2, 2);
    schedule.ranks[1].swap(3, 4);
    let invalid = validate(&schedule).expect_err("a cycle");
    assert_eq!((invalid.rank, invalid.position), (0, 4));
    let RuleViolation::Deadlock { cycle } = invalid.reason else {
        panic!("{invalid}")
    };
    let ranks: Vec<_> = cycle.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, [0, 1]);
}

#[test]
fn times_that_do_not_suit() {
    let schedule = schedule(ScheduleKind::OneFOneB, 4, 8);
    let refusal = |times: &StageTimes| simulate(&schedule, times).expect_err("refused").to_string();
    assert_snapshot!(
        refusal(&StageTimes::uniform(3, 1.0, 1.0, 1.0, 0.0)),
        @"forward has 3 times for 4 stages: expected one per stage"
    );
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        let mut times = StageTimes::uniform(4, 1.0, 1.0, 1.0, 0.0);
        times.transfer[2] = wrong;
        assert_eq!(
            refusal(&times),
            format!(
                "invalid time {wrong} of transfer of stage 2: expected a finite number of 0 or more"
            )
        );
    }
}

#[test]
fn schedules_without_shape() {
    let none = Schedule::new("", vec![0], 1, vec![]).expect_err("no ranks");
    assert_snapshot!(none, @"invalid number of ranks 0: a schedule needs at least 1");
    let outside = Schedule::new("", vec![0, 1], 1, vec![vec![]]).expect_err("no rank 1");
    assert_snapshot!(outside, @"stage 1 is placed on rank 1: expected a rank below 1");
    let empty = Schedule::new("", vec![0], 1, vec![vec![]]).expect("shaped");
    assert!(
        validate(&empty)
            .expect_err("empty")
            .to_string()
            .contains("without \"F 0 0\"")
    );
}
