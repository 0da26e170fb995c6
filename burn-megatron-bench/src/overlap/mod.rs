//! `burn-megatron-bench overlap`.

pub mod case;
pub mod expert;
mod figures;
mod link_steps;
pub mod svg;
pub mod tensor;
pub mod trace;

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron_models::TransformerConfig;
use serde::Serialize;

use super::args::OverlapArgs;
use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::median;
use burn_megatron_cli::internal::wrapped;
use case::{LinkSpeed, OverlapCase, OverlapSetup, RankTimeline};
use figures::{OverlapRow, computing, is_backward};
use svg::{Timeline, svg};

/// A step without a link: the seconds of its backward, and its transfers.
struct Calibration {
    backward: f64,
    calls: f64,
    bytes: f64,
}

/// The run as JSON.
#[derive(Serialize)]
struct OverlapReport {
    layers: usize,
    hidden: usize,
    context: usize,
    samples: usize,
    ranks: usize,
    steps: usize,
    latency_seconds: f64,
    rows: Vec<OverlapRow>,
}

/// Trains over a slow link, and prints how much of the communication is hidden.
pub fn run(args: &OverlapArgs) -> Result<ExitCode, Error> {
    if !args.tensor_parallel.is_empty() {
        return tensor::run(args);
    }
    if !args.expert_parallel.is_empty() {
        return expert::run(args);
    }
    if args.world.engine.is_some() {
        return Err("--engine applies to --tensor-parallel; give that too, or remove it".into());
    }
    let setup = setup(args)?;
    let counted = setup.warm_up..setup.warm_up + setup.steps;
    println!("{}\n", wrapped(&describe(&setup, args)));
    println!("{}", OverlapRow::header());
    let mut runs = vec![];
    for stage in &args.zero_stages {
        let wire = wire(args, &setup, counted.clone())?;
        for overlap in [true, false] {
            let case = OverlapCase {
                stage: *stage,
                overlap,
            };
            let records = setup.run(case, wire)?;
            let row = OverlapRow::new(case, wire, &records, counted.clone());
            println!("{row}");
            if let Some(folder) = &args.trace {
                write_trace(folder, case, &records)?;
            }
            runs.push((row, records));
        }
    }
    let legend = "step, backward, link, blocked: seconds of a step; hidden: 1 - blocked / link; in the trace: the part of \
                  the transfers during which the rank computed; medians over ranks and steps (lowest - highest)";
    println!("\n{}", wrapped(legend));
    if let Some(path) = &args.svg {
        let title = format!(
            "One step of {} layers on {} ranks: what is hidden of the communication",
            setup.model.layers, setup.ranks
        );
        let lines: Vec<_> = runs.iter().map(|run| timeline(run, &counted)).collect();
        write(path, &svg(&title, &lines))?;
    }
    if let Some(path) = &args.json {
        let rows = runs.into_iter().map(|(row, _)| row).collect();
        let report = report(&setup, Duration::from_micros(args.latency_us), rows);
        write(path, &serde_json::to_string_pretty(&report)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn setup(args: &OverlapArgs) -> Result<OverlapSetup, Error> {
    let model = TransformerConfig {
        layers: args.layers,
        hidden: args.hidden,
        context: args.context,
        ..TransformerConfig::gpt2()
    };
    model.check(1, false)?;
    if args.data_parallel < 2 {
        let ranks = args.data_parallel;
        return Err(format!("invalid --data-parallel {ranks}: expected at least 2").into());
    }
    let ranks = args.data_parallel;
    if let Some(per_node) = args.ranks_per_node
        && (per_node < 2 || ranks <= per_node || !ranks.is_multiple_of(per_node))
    {
        return Err(format!(
            "invalid --ranks-per-node {per_node} of {ranks} ranks: expected at least 2, and a multiple of it as --data-parallel, \
             as --data-parallel 4 --ranks-per-node 2"
        )
        .into());
    }
    Ok(OverlapSetup {
        model,
        ranks,
        ranks_per_node: args.ranks_per_node,
        samples: args.micro_batch_size,
        bucket_size: args.bucket_size,
        warm_up: args.warm_up,
        steps: args.steps,
    })
}

/// Trains with an infinitely fast link.
fn calibrate(setup: &OverlapSetup, counted: Range<usize>) -> Result<Calibration, Error> {
    let case = OverlapCase {
        stage: ZeroStage::Replicated,
        overlap: false,
    };
    let wire = LinkSpeed {
        latency: Duration::ZERO,
        bytes_per_second: f64::INFINITY,
    };
    let records = setup.run(case, wire)?;
    let over = |figure: &dyn Fn(&RankTimeline, usize) -> f64| {
        let of = |record| counted.clone().map(move |step| figure(record, step));
        median(&records.iter().flat_map(of).collect::<Vec<_>>())
    };
    Ok(Calibration {
        backward: over(&|record, step| computing(record, step, is_backward)),
        calls: over(&|record, step| record.transfers[step].len() as f64),
        bytes: over(&|record, step| {
            let bytes = record.transfers[step].iter().map(|transfer| transfer.bytes);
            bytes.sum::<u64>() as f64
        }),
    })
}

/// The link of the flags. --share is relative to a backward measured now, as the load of the machine may vary.
fn wire(
    args: &OverlapArgs,
    setup: &OverlapSetup,
    counted: Range<usize>,
) -> Result<LinkSpeed, Error> {
    let latency = Duration::from_micros(args.latency_us);
    let bytes_per_second = match args.bandwidth_mb_s {
        Some(megabytes) => megabytes * 1e6,
        None => calibrate(setup, counted)?.bandwidth(args.share, latency)?,
    };
    Ok(LinkSpeed {
        latency,
        bytes_per_second,
    })
}

impl Calibration {
    /// The bandwidth in bytes per second at which the transfers of a step take this share of the backward.
    fn bandwidth(&self, share: f64, latency: Duration) -> Result<f64, Error> {
        let wanted = share * self.backward;
        let latencies = self.calls * latency.as_secs_f64();
        if wanted > latencies {
            Ok(self.bytes / (wanted - latencies))
        } else {
            Err(format!(
                "--share {share} of a backward of {:.3} s is {wanted:.4} s for the transfers of a step, \
                 but the latencies of its {} calls alone take {latencies:.4} s; use a larger --share or \
                 a lower --latency-us",
                self.backward, self.calls,
            )
            .into())
        }
    }
}

fn describe(setup: &OverlapSetup, args: &OverlapArgs) -> String {
    let link = match args.bandwidth_mb_s {
        Some(megabytes) => format!("{megabytes} MB/s"),
        None => format!(
            "the transfers of a step of ZeRO-0 take {} of the time of its backward, measured before \
             each stage",
            args.share
        ),
    };
    let nodes = setup
        .ranks_per_node
        .map_or(String::new(), |ranks| format!(" on nodes of {ranks}"));
    format!(
        "model    {} layers, hidden {}; {} ranks{nodes} with {} samples of {} tokens, 1 compute thread each\n\
         steps    {} after {} warm-up steps\n\
         link     latency {} us; {link}",
        setup.model.layers,
        setup.model.hidden,
        setup.ranks,
        setup.samples,
        setup.model.context,
        setup.steps,
        setup.warm_up,
        args.latency_us,
    )
}

fn name(case: OverlapCase) -> String {
    let overlap = if case.overlap { "on" } else { "off" };
    format!("ZeRO-{}, overlap {overlap}", case.stage)
}

/// The last measured step of rank 0.
fn timeline<'a>(
    (row, records): &'a (OverlapRow, Vec<RankTimeline>),
    counted: &Range<usize>,
) -> Timeline<'a> {
    let case = OverlapCase {
        stage: row.zero_stage,
        overlap: row.overlap,
    };
    let (start, end) = records[0].steps[counted.end - 1];
    Timeline {
        title: format!("{}: {:.0} % hidden", name(case), 100.0 * row.hidden.median),
        events: &records[0].events,
        step: (start, end),
    }
}

fn write_trace(folder: &Path, case: OverlapCase, records: &[RankTimeline]) -> Result<(), Error> {
    fs::create_dir_all(folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let off = if case.overlap { "" } else { "-off" };
    let path = folder.join(format!("overlap-{}{off}.json", case.stage));
    let events: Vec<_> = records.iter().map(|record| &record.events[..]).collect();
    trace::write_chrome(&path, &events)
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    replace_file(path, text.as_bytes())
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}

fn report(setup: &OverlapSetup, latency: Duration, rows: Vec<OverlapRow>) -> OverlapReport {
    OverlapReport {
        layers: setup.model.layers,
        hidden: setup.model.hidden,
        context: setup.model.context,
        samples: setup.samples,
        ranks: setup.ranks,
        steps: setup.steps,
        latency_seconds: latency.as_secs_f64(),
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_flags::parse;

    fn args(flags: &[&str]) -> OverlapArgs {
        parse(flags).unwrap()
    }

    const STEP: Calibration = Calibration {
        backward: 2.0,
        calls: 10.0,
        bytes: 50e6,
    };

    #[test]
    fn the_share_of_the_backward_gives_the_bandwidth() {
        // 1 s, half of it latency.
        let bandwidth = STEP.bandwidth(0.5, Duration::from_millis(50)).unwrap();
        assert_eq!(bandwidth, 100e6);
    }

    #[test]
    fn a_bandwidth_is_taken_as_it_is() {
        let args = args(&["--bandwidth-mb-s", "12.5", "--latency-us", "7"]);
        let setup = setup(&args).unwrap();
        let wire = wire(&args, &setup, 2..7).unwrap();
        assert_eq!(wire.bytes_per_second, 12.5e6);
        assert_eq!(wire.latency, Duration::from_micros(7));
        assert!(describe(&setup, &args).ends_with("latency 7 us; 12.5 MB/s"));
    }

    #[test]
    fn invalid_links_are_refused() {
        let error = STEP.bandwidth(0.1, Duration::from_millis(100)).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("10 calls alone take 1.0000 s"), "{error}");
        let alone = setup(&args(&["--data-parallel", "1"])).err().unwrap();
        assert!(alone.to_string().contains("expected at least 2"), "{alone}");
        for [ranks, per_node] in [["4", "3"], ["4", "1"], ["2", "2"]] {
            let uneven = args(&["--data-parallel", ranks, "--ranks-per-node", per_node]);
            let error = setup(&uneven).err().unwrap().to_string();
            assert!(error.starts_with("invalid --ranks-per-node"), "{error}");
        }
        for flags in [
            ["--share", "0"],
            ["--bandwidth-mb-s", "-3"],
            ["--steps", "0"],
            ["--zero-stages", "4"],
        ] {
            assert!(parse::<OverlapArgs>(&flags).is_err(), "{flags:?}");
        }
    }

    #[test]
    fn a_small_run_is_recorded_whole() {
        let setup = OverlapSetup {
            model: TransformerConfig {
                layers: 2,
                hidden: 32,
                context: 16,
                ..TransformerConfig::gpt2()
            },
            ranks: 2,
            ranks_per_node: None,
            samples: 1,
            bucket_size: None,
            warm_up: 1,
            steps: 2,
        };
        let wire = LinkSpeed {
            latency: Duration::from_micros(200),
            bytes_per_second: 1e8,
        };
        let both = |stage| [true, false].map(|overlap| OverlapCase { stage, overlap });
        for case in ZeroStage::ALL.into_iter().flat_map(both) {
            let records = setup.run(case, wire).unwrap();
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
            let row = OverlapRow::new(case, wire, &records, 1..3);
            assert!(row.transfer_seconds > 0.0 && row.step_seconds > 0.0);
            assert!((0.0..=1.0).contains(&row.hidden_in_trace.median), "{row}");
        }
    }
}
