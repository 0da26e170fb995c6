//! Shows the progress of a training run on standard error.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

use indicatif::{FormattedDuration, HumanCount, ProgressBar, ProgressFinish, ProgressStyle};

use super::expert_metrics::ExpertMetrics;
use super::metrics::{HeldOutMetrics, SkipReason, StepMetrics, StepTiming};

/// The longest time without a line, if the output is a file or a pipe.
const MAX_LINE_INTERVAL: Duration = Duration::from_secs(30);

/// A narrow terminal truncates the message, so the most important part comes first. The remaining time is computed
/// here: the estimate of the progress bar would count the steps before a resumed run.
const TEMPLATE: &str = "{pos}/{len} {bar:10.cyan/blue} ETA {prefix}  {wide_msg}";

/// Shows the progress of a training run on standard error.
///
/// A terminal shows a progress bar. For other outputs (CI, pipes, log files), plain lines are printed: at the first and
/// the last step, after each tenth of the run, and after 30 seconds without a line. Only rank 0 shows the progress.
/// Steps are numbered from 1. Errors of writing to standard error are ignored.
pub struct Progress {
    output: ProgressOutput,
    steps: Range<usize>,
    started: Instant,
    /// The loss scale shown last.
    scale: Option<f64>,
    /// The unit of text in "bits per UNIT".
    unit: &'static str,
    /// Whether the last step was shown.
    is_shown: bool,
}

enum ProgressOutput {
    Bar(ProgressBar),
    Lines {
        writer: Box<dyn Write + Send>,
        last: Instant,
    },
    Silent,
}

impl Progress {
    /// Starts to show the progress of the updates in `steps`. The range is `0..total` for a new run, and starts at the
    /// resumed step for a resumed run.
    ///
    /// `rank` is the global rank of the caller.
    pub fn start(rank: usize, steps: Range<usize>) -> Self {
        let output = if rank != 0 {
            ProgressOutput::Silent
        } else if io::stderr().is_terminal() {
            ProgressOutput::Bar(bar(&steps))
        } else {
            ProgressOutput::Lines {
                writer: Box::new(io::stderr()),
                last: Instant::now(),
            }
        };
        Self {
            output,
            steps,
            started: Instant::now(),
            scale: None,
            unit: "byte",
            is_shown: false,
        }
    }

    /// Sets the unit in "bits per UNIT", in which held-out losses are shown. The default is `byte`.
    pub fn in_bits_per(mut self, unit: &'static str) -> Self {
        self.unit = unit;
        self
    }

    /// Shows a finished step.
    pub fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) {
        let done = metrics.step;
        self.is_shown = match &mut self.output {
            ProgressOutput::Silent => false,
            ProgressOutput::Bar(_) => true,
            ProgressOutput::Lines { last, .. } => {
                let due = is_due(done, &self.steps) || last.elapsed() >= MAX_LINE_INTERVAL;
                if due {
                    *last = Instant::now();
                }
                due
            }
        };
        if !self.is_shown {
            return;
        }
        let scale = self.scale(metrics);
        let measurements = measurements(metrics, timing) + &scale;
        if let ProgressOutput::Bar(bar) = &self.output {
            bar.set_prefix(self.eta(done).to_string());
            bar.set_message(measurements);
            bar.set_position(done as u64);
        } else {
            let (total, eta) = (self.steps.end, self.eta(done));
            self.note(&format!("step {done}/{total}  {measurements}  ETA {eta}"));
        }
    }

    /// Shows the largest load of an expert in the step that was shown last, divided by the mean load of the experts of
    /// its layer. If (token, expert) pairs were dropped, it also shows the fraction of dropped pairs.
    pub fn experts(&mut self, metrics: &ExpertMetrics) {
        let Some((layer, max)) = metrics.most_loaded().filter(|_| self.is_shown) else {
            return;
        };
        let mut load = format!("max load {max:.2} in {}", layer.layer);
        let dropped = metrics.dropped_fraction();
        if dropped > 0.0 {
            load += &format!("  dropped {:.2} %", 100.0 * dropped);
        }
        if let ProgressOutput::Bar(bar) = &self.output {
            bar.set_message(format!("{}  {load}", bar.message()));
        } else {
            let (done, total) = (metrics.step, self.steps.end);
            self.note(&format!("step {done}/{total}  {load}"));
        }
    }

    /// Returns the loss scale if it differs from the last shown scale, or if the step was skipped.
    fn scale(&mut self, metrics: &StepMetrics) -> String {
        let before = std::mem::replace(&mut self.scale, metrics.loss_scale);
        match metrics.loss_scale {
            Some(scale) if metrics.skipped || before != Some(scale) => format!("  scale {scale}"),
            _ => String::new(),
        }
    }

    /// Shows a held-out loss.
    pub fn held_out(&mut self, metrics: &HeldOutMetrics) {
        let HeldOutMetrics {
            step,
            loss,
            bits_per_byte,
            tokens,
            ..
        } = metrics;
        let (total, unit) = (self.steps.end, self.unit);
        let measured = match tokens {
            0 => "no held-out loss: all held-out targets are masked".into(),
            _ => format!("held-out loss {loss:.4}  {bits_per_byte:.4} bits per {unit}"),
        };
        self.note(&format!("step {step}/{total}  {measured}"));
    }

    /// Shows a line of text. If there is a progress bar, the line is above the bar.
    pub fn note(&mut self, line: &str) {
        match &mut self.output {
            ProgressOutput::Silent => {}
            ProgressOutput::Bar(bar) => bar.println(line),
            ProgressOutput::Lines { writer, .. } => {
                let _ = writeln!(writer, "{line}");
            }
        }
    }

    /// Ends the progress bar at its current position. Dropping this value has the same effect.
    pub fn finish(&mut self) {
        if let ProgressOutput::Bar(bar) = &self.output {
            bar.abandon();
        }
    }

    /// Returns the remaining time, from the mean time per step of this process.
    fn eta(&self, done: usize) -> FormattedDuration {
        let run = done.saturating_sub(self.steps.start).max(1);
        let left = self.steps.end.saturating_sub(done);
        let seconds = self.started.elapsed().as_secs_f64() * left as f64 / run as f64;
        FormattedDuration(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

fn bar(steps: &Range<usize>) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is a constant");
    ProgressBar::new(steps.end as u64)
        .with_style(style.progress_chars("━╸─"))
        .with_finish(ProgressFinish::Abandon)
        .with_position(steps.start as u64)
        .with_prefix("-")
}

/// Returns whether a plain line is due after `done` updates.
fn is_due(done: usize, steps: &Range<usize>) -> bool {
    let tenth = |done: usize| done as u128 * 10 / steps.end.max(1) as u128;
    done == steps.start + 1 || done == steps.end || tenth(done) > tenth(done.saturating_sub(1))
}

/// Returns the loss in nats per token, the objective if it differs, the gradient norm and the throughput.
fn measurements(metrics: &StepMetrics, timing: &StepTiming) -> String {
    let loss = format!("{:.4}", metrics.loss);
    let (loss, skipped) = match (metrics.skipped, metrics.skip_reason) {
        (false, _) => (loss, ""),
        (true, Some(SkipReason::NoTargets)) => ("none".into(), "  skipped: no targets"),
        (true, Some(SkipReason::Spike)) => (loss, "  skipped: a spike"),
        (true, _) => (loss, "  skipped"),
    };
    let objective = metrics.minimised.objective;
    let objective = objective.map_or(String::new(), |value| format!("  objective {value:.4}"));
    format!(
        "loss {loss}{objective}  grad {:.3}  {} tokens/s  {:.1} GFLOP/s{skipped}",
        metrics.gradient_norm,
        HumanCount(timing.tokens_per_second as u64),
        timing.flops_per_second / 1e9,
    )
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use indicatif::ProgressDrawTarget;
    use insta::assert_snapshot;

    use super::super::expert_metrics::LayerLoad;
    use super::super::metrics::Minimised;
    use super::*;

    #[derive(Clone, Default)]
    struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic while writing").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(steps: Range<usize>) -> (Progress, SharedBuffer) {
        let shared = SharedBuffer::default();
        let writer = Box::new(shared.clone());
        let output = ProgressOutput::Lines {
            writer,
            last: Instant::now(),
        };
        (
            Progress {
                output,
                steps,
                started: Instant::now(),
                scale: None,
                unit: "byte",
                is_shown: false,
            },
            shared,
        )
    }

    /// Returns the measurements of the step after `before` updates.
    fn step(before: usize) -> (StepMetrics, StepTiming) {
        let step = before + 1;
        let metrics = StepMetrics {
            step,
            loss: 3.25,
            bits_per_byte: 4.7,
            minimised: Minimised::default(),
            gradient_norm: 0.5,
            learning_rate: 1e-3,
            tokens: 1024,
            skipped: before == 0,
            skip_reason: (before == 0).then_some(SkipReason::NotFinite),
            loss_scale: None,
            zeros: None,
            max_attention_logit: None,
        };
        let (tokens_per_second, flops_per_second) = (12_345.6, 1.5e9);
        (
            metrics,
            StepTiming {
                step,
                seconds: 0.1,
                tokens_per_second,
                flops_per_second,
            },
        )
    }

    fn run(progress: &mut Progress, steps: Range<usize>) {
        for i in steps {
            let (metrics, timing) = step(i);
            progress.step(&metrics, &timing);
        }
    }

    fn text(shared: &SharedBuffer) -> String {
        String::from_utf8(shared.0.lock().expect("no panic").clone()).expect("text")
    }

    #[test]
    fn plain_lines_come_at_the_first_each_tenth_and_the_last_step() {
        let shown = |steps: Range<usize>| -> Vec<usize> {
            steps
                .clone()
                .map(|step| step + 1)
                .filter(|&done| is_due(done, &steps))
                .collect()
        };
        assert_eq!(shown(0..100), [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]);
        assert_eq!(shown(55..100), [56, 60, 70, 80, 90, 100]);
        assert_eq!(shown(0..25), [1, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25]);
        assert_eq!(shown(0..3), [1, 2, 3]);
        assert!(shown(0..0).is_empty());
    }

    #[test]
    fn a_plain_line_says_what_was_measured() {
        let (mut progress, shared) = lines(0..1000);
        run(&mut progress, 0..100);
        let metrics = HeldOutMetrics {
            step: 100,
            loss: 3.5,
            bits_per_byte: 5.05,
            minimised: Minimised::default(),
            tokens: 512,
        };
        progress.held_out(&metrics);
        let text = text(&shared);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        let first =
            "step 1/1000  loss 3.2500  grad 0.500  12,345 tokens/s  1.5 GFLOP/s  skipped  ETA ";
        assert!(lines[0].starts_with(first), "{text}");
        assert!(
            lines[1].starts_with("step 100/1000  loss 3.2500") && !lines[1].contains("skipped")
        );
        assert_snapshot!(lines[2], @"step 100/1000  held-out loss 3.5000  5.0500 bits per byte");
        let (progress, shared) = self::lines(0..1000);
        progress.in_bits_per("token").held_out(&metrics);
        assert!(self::text(&shared).ends_with("5.0500 bits per token\n"));
        let (mut progress, shared) = self::lines(0..1000);
        progress.held_out(&HeldOutMetrics {
            loss: f64::NAN,
            tokens: 0,
            ..metrics
        });
        let nothing = "step 100/1000  no held-out loss: all held-out targets are masked\n";
        assert_eq!(self::text(&shared), nothing);
    }

    #[test]
    fn a_loss_scale_is_shown_when_it_changes_or_did_not_fit() {
        let (mut progress, shared) = lines(0..6);
        let scales = [8.0, 4.0, 4.0, 4.0, 1.0, 1.0];
        for (i, scale) in scales.into_iter().enumerate() {
            let (mut metrics, timing) = step(i);
            metrics.loss_scale = (scale != 1.0).then_some(scale);
            metrics.skipped = i == 3;
            progress.step(&metrics, &timing);
        }
        let text = text(&shared);
        let shown: Vec<_> = text
            .lines()
            .map(|line| line.split_once("  scale ").map(|(_, scale)| &scale[..1]))
            .collect();
        let expected = [Some("8"), Some("4"), None, Some("4"), None, None];
        assert_eq!(shown, expected, "{text}");
    }

    fn experts(before: usize, dropped: u64) -> ExpertMetrics {
        let layer = |number: usize, load: &[u64]| LayerLoad {
            layer: format!("blocks.{number}.moe"),
            load: load.to_vec(),
            dropped: dropped * number as u64,
            losses: vec![],
        };
        let layers = vec![layer(0, &[4, 4]), layer(1, &[5, 3])];
        let step = before + 1;
        ExpertMetrics { step, layers }
    }

    #[test]
    fn the_largest_load_is_shown_with_its_step() {
        let (mut progress, shared) = lines(0..1000);
        for i in 0..100 {
            run(&mut progress, i..i + 1);
            progress.experts(&experts(i, i as u64 / 99 * 4));
        }
        let text = text(&shared);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_snapshot!(lines[1], @"step 1/1000  max load 1.25 in blocks.1.moe");
        let dropped = "step 100/1000  max load 1.25 in blocks.1.moe  dropped 20.00 %";
        assert_eq!(lines[3], dropped);
    }

    #[test]
    fn a_slow_run_is_not_silent() {
        let (mut progress, shared) = lines(0..1000);
        run(&mut progress, 1..5);
        assert_eq!(text(&shared), "");
        if let ProgressOutput::Lines { last, .. } = &mut progress.output {
            *last = Instant::now()
                .checked_sub(MAX_LINE_INTERVAL)
                .expect("the clock is older");
        }
        run(&mut progress, 5..9);
        assert_eq!(text(&shared).lines().count(), 1);
        assert!(text(&shared).starts_with("step 6/1000"));
    }

    #[test]
    fn the_time_left_counts_the_steps_of_this_run_alone() {
        let (mut progress, _) = lines(50..100);
        progress.started = Instant::now()
            .checked_sub(Duration::from_secs(100))
            .expect("older");
        assert_eq!(progress.eta(60).to_string(), "00:06:40");
        assert_eq!(progress.eta(100).to_string(), "00:00:00");
    }

    #[test]
    fn the_bar_carries_position_and_measurements() {
        let hidden = bar(&(10..20));
        hidden.set_draw_target(ProgressDrawTarget::hidden());
        assert_eq!((hidden.position(), hidden.length()), (10, Some(20)));
        let output = ProgressOutput::Bar(hidden.clone());
        let mut progress = Progress {
            output,
            steps: 10..20,
            started: Instant::now(),
            scale: None,
            unit: "byte",
            is_shown: false,
        };
        run(&mut progress, 10..15);
        progress.started = Instant::now()
            .checked_sub(Duration::from_secs(100))
            .expect("older");
        run(&mut progress, 15..16);
        // Six steps in 100 seconds, and four are left.
        assert_eq!(hidden.prefix(), "00:01:06");
        run(&mut progress, 16..20);
        let measured = "loss 3.2500  grad 0.500  12,345 tokens/s  1.5 GFLOP/s";
        assert_eq!(hidden.message(), measured);
        progress.experts(&experts(19, 0));
        progress.finish();
        assert_eq!(hidden.position(), 20);
        let load = "max load 1.25 in blocks.1.moe";
        assert_eq!(hidden.message(), format!("{measured}  {load}"));
        assert!(hidden.is_finished());
    }

    #[test]
    fn other_ranks_are_silent() {
        assert!(matches!(
            Progress::start(1, 0..10).output,
            ProgressOutput::Silent
        ));
        assert!(!matches!(
            Progress::start(0, 0..10).output,
            ProgressOutput::Silent
        ));
    }

    #[test]
    fn numbers_that_are_not_finite_are_shown() {
        let (mut metrics, mut timing) = step(0);
        (metrics.loss, timing.tokens_per_second) = (f64::NAN, f64::INFINITY);
        assert!(measurements(&metrics, &timing).starts_with("loss NaN"));
        metrics.skip_reason = Some(SkipReason::NoTargets);
        let shown = measurements(&metrics, &timing);
        assert!(shown.starts_with("loss none") && shown.ends_with("  skipped: no targets"));
    }

    #[test]
    fn the_objective_is_shown_beside_the_loss() {
        let (mut metrics, timing) = step(1);
        metrics.minimised.objective = Some(3.5);
        metrics.minimised.z_loss = Some(0.25);
        assert!(
            measurements(&metrics, &timing)
                .starts_with("loss 3.2500  objective 3.5000  grad 0.500")
        );
    }
}
