//! The table and the JSON of a search.

use std::collections::BTreeMap;
use std::fmt::Write;

use burn_megatron::text_table::Table;
use burn_megatron_plan::memory::MemoryByKind;
use burn_megatron_plan::search::{Plan, SearchCounts, SearchReport};
use burn_megatron_plan::time::StepPart;
use indicatif::HumanBytes;
use serde::Serialize;

use crate::numbers::grouped;
use crate::terminal;

/// Numeric values of a plan.
#[derive(Serialize)]
pub struct PlanRow {
    layout: String,
    seconds: f64,
    tokens_per_second: f64,
    mfu: f64,
    bubble: f64,
    memory: MemoryByKind,
    memory_total: u64,
    /// The number of bytes that a rank sends per step.
    bytes: BTreeMap<String, f64>,
    /// The seconds of each part of a step.
    parts: BTreeMap<&'static str, f64>,
    /// The part of a step with the longest time, except matrix multiplications and attention.
    largest: &'static str,
    /// The part that takes the most additional time compared with the best plan, and the additional seconds.
    loses: Option<(&'static str, f64)>,
}

/// Numeric result of a search.
#[derive(Serialize)]
pub struct PlanReport<'a> {
    plans: Vec<PlanRow>,
    nearest: Option<PlanRow>,
    counts: &'a SearchCounts,
}

impl PlanRow {
    fn new(plan: &Plan, best: &Plan) -> Self {
        let part = |(part, seconds): (StepPart, f64)| (part.name(), seconds);
        let bytes = plan.step.bytes.iter();
        Self {
            layout: plan.candidate.to_string(),
            seconds: plan.step.seconds,
            tokens_per_second: plan.tokens_per_second,
            mfu: plan.mfu,
            bubble: plan.step.bubble,
            memory: plan.memory,
            memory_total: plan.memory.total(),
            bytes: bytes
                .map(|(axis, bytes)| (axis.to_string(), bytes))
                .collect(),
            parts: plan.step.parts.iter().map(part).collect(),
            largest: plan.step.parts.largest_cost().name(),
            loses: plan.loses_by(best).map(part),
        }
    }
}

impl<'a> PlanReport<'a> {
    /// Returns the rows of a search.
    pub fn new(report: &'a SearchReport) -> Self {
        let best = report.best.first();
        let rows = report.best.iter();
        Self {
            plans: rows
                .map(|plan| PlanRow::new(plan, best.unwrap_or(plan)))
                .collect(),
            nearest: report.nearest.as_ref().map(|plan| PlanRow::new(plan, plan)),
            counts: &report.counts,
        }
    }
}

/// Formats seconds with three significant digits, as in `28.8 s` or `1.25 ms`.
fn seconds(seconds: f64) -> String {
    let (scaled, unit) = match seconds {
        1.0.. => (seconds, "s"),
        1e-3.. => (1e3 * seconds, "ms"),
        _ => (1e6 * seconds, "us"),
    };
    let digits = (2.0 - scaled.log10().floor()).clamp(0.0, 2.0);
    format!("{scaled:.*} {unit}", digits as usize)
}

fn bytes(bytes: f64) -> String {
    HumanBytes(bytes as u64).to_string()
}

/// Returns the numeric values of one plan.
pub fn row(plan: &Plan) -> PlanRow {
    PlanRow::new(plan, plan)
}

/// Returns one plan as text: its line, then its memory, time and traffic.
pub fn own(plan: &Plan) -> String {
    format!("{}\n{}", lines(std::slice::from_ref(plan)), details(plan))
}

/// Returns the best plans, one line each.
pub fn plans(report: &SearchReport) -> String {
    lines(&report.best)
}

fn lines(plans: &[Plan]) -> String {
    let Some(best) = plans.first() else {
        return String::new();
    };
    let head = [
        "layout", "step", "tokens/s", "MFU", "bubble", "memory", "loses",
    ];
    let row = |plan: &Plan| {
        let loses = match plan.loses_by(best) {
            Some((part, lost)) => format!("{}, {}", part.name(), seconds(lost)),
            None => format!(
                "-; its largest cost: {}",
                plan.step.parts.largest_cost().name()
            ),
        };
        vec![
            plan.candidate.to_string(),
            seconds(plan.step.seconds),
            grouped(plan.tokens_per_second as usize),
            format!("{:.1} %", 100.0 * plan.mfu),
            format!("{:.1} %", 100.0 * plan.step.bubble),
            bytes(plan.memory.total() as f64),
            loses,
        ]
    };
    let rows = std::iter::once(head.map(String::from).to_vec()).chain(plans.iter().map(row));
    let table = Table::new(rows).with_left([0, 6]).with_optional([6, 4, 3]);
    table.fit(terminal::width()) + "\n"
}

/// Describes the memory, the time and the traffic of one plan.
pub fn details(plan: &Plan) -> String {
    let memory = plan.memory;
    let of = |all: Vec<(String, String)>| {
        let all = all.into_iter().map(|(name, size)| format!("{name} {size}"));
        all.collect::<Vec<_>>().join(", ")
    };
    let memory = memory.kinds().into_iter().filter(|(_, size)| *size > 0);
    let memory = memory.map(|(name, size)| (name.to_string(), bytes(size as f64)));
    let least = plan.step.seconds / 1000.0;
    let parts = plan.step.parts.iter().filter(|(_, time)| *time > least);
    let parts = parts.map(|(part, time)| (part.name().to_string(), seconds(time)));
    let sent = plan.step.bytes.iter();
    let sent = sent.map(|(axis, size)| (axis.to_string(), bytes(size)));
    terminal::wrapped(&format!(
        "{}\nmemory  {}\ntime    {}\nsent    {}",
        plan.candidate,
        of(memory.collect()),
        of(parts.collect()),
        of(sent.collect()),
    )) + "\n"
}

/// Describes the number of candidates, and the reasons why candidates were rejected.
pub fn counts(report: &SearchReport) -> String {
    let counts = &report.counts;
    let candidates = grouped(counts.candidates as usize);
    let mut text = format!("{candidates} candidates:\n");
    let mut line = |number: u64, what: &str| {
        let _ = writeln!(text, "{:>12}  {what}", grouped(number as usize));
    };
    line(report.best.len() as u64, "are shown");
    for (reason, count) in &counts.rejected {
        let example = count.example.as_ref();
        let example = example.and_then(|text| text.lines().next());
        let example = example.map_or(String::new(), |text| format!(": {text}"));
        line(count.candidates, &format!("{}{example}", reason.describe()));
    }
    terminal::wrapped(&text) + "\n"
}
