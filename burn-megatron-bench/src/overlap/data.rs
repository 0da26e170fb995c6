//! Measures the overlap of data-parallel communication, for each ZeRO stage with and without overlap.

use std::fs;
use std::ops::Range;
use std::path::Path;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron_cli::internal::{Error, median};
use burn_megatron_models::TransformerConfig;
use serde::Serialize;

use super::args::OverlapArgs;
use super::case::{OverlapCase, OverlapSetup};
use super::figures::{COLUMNS, OverlapRow, computing, is_backward};
use crate::links::{LinkSpeed, Traffic};
use crate::report::{Report, write};
use crate::svg::{Timeline, svg};
use crate::timeline::{RankTimeline, write_chrome};

/// The settings in the JSON file.
#[derive(Serialize)]
struct Settings {
    layers: usize,
    hidden: usize,
    context: usize,
    samples: usize,
    ranks: usize,
    steps: usize,
    latency_seconds: f64,
}

/// Trains over a simulated slow link, and prints the share of the communication that overlaps with computation.
pub fn run(args: &OverlapArgs) -> Result<(), Error> {
    let setup = setup(args)?;
    let counted = args.steps.warm_up..args.steps.warm_up + args.steps.steps;
    let settings = Settings {
        layers: args.layers,
        hidden: args.hidden,
        context: args.context,
        samples: args.micro_batch_size,
        ranks: args.data_parallel,
        steps: args.steps.steps,
        latency_seconds: args.latency().as_secs_f64(),
    };
    let mut report = Report::begin(&describe(args), COLUMNS, settings, &args.steps.json);
    let mut runs = vec![];
    for stage in &args.zero_stages {
        let link = link(&setup, counted.clone())?;
        for overlap in [true, false] {
            let case = OverlapCase {
                stage: *stage,
                overlap,
            };
            let records = setup.run(case, link)?;
            let row = OverlapRow::new(case, link, &records, counted.clone());
            if let Some(folder) = &args.trace {
                write_trace(folder, case, &records)?;
            }
            runs.push((title(case, &row), records));
            report.add(row)?;
        }
    }
    if let Some(path) = &args.svg {
        let about = format!(
            "One step of {} layers on {} ranks: hidden communication",
            args.layers, args.data_parallel
        );
        // The last measured step of rank 0.
        let lines = runs.iter().map(|(title, records)| Timeline {
            title: title.clone(),
            events: &records[0].events,
            step: records[0].steps[counted.end - 1],
        });
        write(path, svg(&about, &lines.collect::<Vec<_>>())?.as_bytes())?;
    }
    report.finish(
        "step, backward, link, blocked: seconds of a step; hidden: 1 - blocked / link; in the trace: the part of the transfers \
         during which the rank computed; medians over ranks and steps (lowest - highest)",
    )
}

fn setup(args: &OverlapArgs) -> Result<OverlapSetup<'_>, Error> {
    let model = TransformerConfig {
        layers: args.layers,
        hidden: args.hidden,
        context: args.context,
        ..TransformerConfig::gpt2()
    };
    model.check(1, false)?;
    let ranks = args.data_parallel;
    if ranks < 2 {
        return Err(format!("invalid --data-parallel {ranks}: expected at least 2").into());
    }
    if let Some(per_node) = args.ranks_per_node
        && (per_node < 2 || ranks <= per_node || !ranks.is_multiple_of(per_node))
    {
        return Err(format!(
            "invalid --ranks-per-node {per_node} for {ranks} ranks: expected at least 2, and --data-parallel set to a \
             larger multiple, such as --data-parallel 4 --ranks-per-node 2"
        )
        .into());
    }
    Ok(OverlapSetup { args, model })
}

/// Returns the latency and bandwidth of the link that the flags select. `--share` is relative to a backward that is
/// measured now, because the load of the machine may vary.
fn link(setup: &OverlapSetup, counted: Range<usize>) -> Result<LinkSpeed, Error> {
    let (args, latency) = (setup.args, setup.args.latency());
    match args.bandwidth_mb_s {
        Some(megabytes) => Ok(LinkSpeed {
            latency,
            bytes_per_second: megabytes * 1e6,
        }),
        None => backward(setup, counted)?.link(args.share, latency),
    }
}

/// Returns the time of the backward of a ZeRO-0 step without a simulated link, and the transfers of the step.
fn backward(setup: &OverlapSetup, counted: Range<usize>) -> Result<Traffic, Error> {
    let case = OverlapCase {
        stage: ZeroStage::Replicated,
        overlap: false,
    };
    let records = setup.run(case, LinkSpeed::INFINITE)?;
    let over = |figure: &dyn Fn(&RankTimeline, usize) -> f64| {
        let of = |record| counted.clone().map(move |step| figure(record, step));
        median(&records.iter().flat_map(of).collect::<Vec<_>>())
    };
    Ok(Traffic {
        seconds: over(&|record, step| computing(record, step, is_backward)),
        calls: over(&|record, step| record.transfers[step].len() as f64),
        bytes: over(&|record, step| {
            let bytes = record.transfers[step].iter().map(|transfer| transfer.bytes);
            bytes.sum::<u64>() as f64
        }),
    })
}

fn describe(args: &OverlapArgs) -> String {
    let link = match args.bandwidth_mb_s {
        Some(megabytes) => format!("{megabytes} MB/s"),
        None => format!(
            "the transfers of a ZeRO-0 step take {} of its backward time, which is measured before each stage",
            args.share
        ),
    };
    let nodes = args.ranks_per_node;
    let nodes = nodes.map_or(String::new(), |ranks| format!(" on nodes of {ranks}"));
    format!(
        "model    {} layers, hidden {}; {} ranks{nodes} with {} samples of {} tokens, 1 compute thread each\n\
         steps    {} after {} warm-up steps\n\
         link     latency {} us; {link}",
        args.layers,
        args.hidden,
        args.data_parallel,
        args.micro_batch_size,
        args.context,
        args.steps.steps,
        args.steps.warm_up,
        args.latency_us,
    )
}

fn title(case: OverlapCase, row: &OverlapRow) -> String {
    let overlap = if case.overlap { "on" } else { "off" };
    let hidden = 100.0 * row.hidden.median;
    format!(
        "ZeRO-{}, overlap {overlap}: {hidden:.0} % hidden",
        case.stage
    )
}

fn write_trace(folder: &Path, case: OverlapCase, records: &[RankTimeline]) -> Result<(), Error> {
    fs::create_dir_all(folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let off = if case.overlap { "" } else { "-off" };
    let path = folder.join(format!("overlap-{}{off}.json", case.stage));
    let events: Vec<_> = records.iter().map(|record| &record.events[..]).collect();
    write_chrome(&path, &events)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::test_flags::parse_text;

    fn args(flags: &str) -> OverlapArgs {
        parse_text(flags).unwrap()
    }

    #[test]
    fn a_bandwidth_is_taken_as_it_is() {
        let args = args("--bandwidth-mb-s 12.5 --latency-us 7");
        let link = link(&setup(&args).unwrap(), 2..7).unwrap();
        assert_eq!(link.bytes_per_second, 12.5e6);
        assert_eq!(link.latency, Duration::from_micros(7));
        assert!(describe(&args).ends_with("latency 7 us; 12.5 MB/s"));
    }

    #[test]
    fn invalid_links_are_refused() {
        for (flags, expected) in [
            (
                "--data-parallel 1",
                "invalid --data-parallel 1: expected at least 2",
            ),
            (
                "--data-parallel 4 --ranks-per-node 3",
                "invalid --ranks-per-node 3",
            ),
            (
                "--data-parallel 4 --ranks-per-node 1",
                "invalid --ranks-per-node 1",
            ),
            (
                "--data-parallel 2 --ranks-per-node 2",
                "invalid --ranks-per-node 2",
            ),
        ] {
            let args = args(flags);
            let error = setup(&args).err().unwrap().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        for flags in [
            "--share 0",
            "--bandwidth-mb-s -3",
            "--steps 0",
            "--zero-stages 4",
        ] {
            assert!(parse_text::<OverlapArgs>(flags).is_err(), "{flags}");
        }
    }

    #[test]
    fn a_small_run_is_recorded_whole() {
        let small =
            "--layers 2 --hidden 32 --context 16 --micro-batch-size 1 --warm-up 1 --steps 2";
        let args = args(small);
        let setup = setup(&args).unwrap();
        let link = LinkSpeed {
            latency: Duration::from_micros(200),
            bytes_per_second: 1e8,
        };
        let both = |stage| [true, false].map(|overlap| OverlapCase { stage, overlap });
        for case in ZeroStage::ALL.into_iter().flat_map(both) {
            let records = setup.run(case, link).unwrap();
            assert_eq!(records.len(), 2);
            for record in &records {
                assert_eq!(record.steps.len(), 4);
                let sent = |step: usize| -> Vec<_> {
                    let all = record.transfers[step].iter();
                    all.map(|transfer| (transfer.op, transfer.bytes)).collect()
                };
                assert!(sent(1).len() > 2, "{case:?}");
                assert_eq!(sent(1), sent(2), "{case:?}");
                // The first step prefetches in a guessed order, and may gather too much.
                let mut waited = record.transfers[1..3].iter().flatten();
                assert!(waited.all(|transfer| transfer.begin_wait.is_some()));
            }
            let row = OverlapRow::new(case, link, &records, 1..3);
            assert!(row.transfer_seconds > 0.0 && row.step_seconds > 0.0);
            assert!((0.0..=1.0).contains(&row.hidden_in_trace.median), "{row:?}");
        }
    }
}
