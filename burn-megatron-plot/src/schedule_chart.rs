//! Draws a simulated pipeline schedule as a Gantt chart.

use burn_megatron::pipeline::schedule::{ActionKind, ActionSpan, Simulation};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::gantt::{Gantt, number};
use crate::{PlotError, failed, render};

const IDLE: RGBColor = RGBColor(246, 246, 246);

const WIDTH: i32 = 1200;
const LEFT: i32 = 76;
const RIGHT: i32 = 24;
const TOP: i32 = 84;
const BOTTOM: i32 = 56;
const ROW: i32 = 44;
const GAP: i32 = 8;
/// The height of the part of a row in which transfers are drawn.
const STRIP: i32 = 6;
/// The maximum number of shades in the legend.
const MAX_SHADES: usize = 4;
/// The maximum number of actions. A larger picture would be slow to open and unreadable.
const MAX_SPANS: usize = 200_000;

type DrawResult = Result<(), PlotError>;

/// Draws a simulated pipeline schedule as an SVG Gantt chart that is 1200 pixels wide.
///
/// The chart has one row per rank, and time runs from left to right. Each computation is a box with the number of its
/// micro-batch. If a rank has several stages (chunks), boxes of later stages are lighter. Transfers are drawn below the
/// computations. Gradient reductions take no time in the simulation and are not drawn.
///
/// # Errors
///
/// [`PlotError::Draw`] if drawing fails or the schedule has more than 200 000 actions.
pub fn schedule_chart(simulation: &Simulation) -> Result<String, PlotError> {
    let spans: usize = simulation.all_timelines().map(<[ActionSpan]>::len).sum();
    if spans > MAX_SPANS {
        return Err(PlotError::Draw(format!(
            "{spans} actions are more than the maximum of {MAX_SPANS}: use fewer micro-batches"
        )));
    }
    let height = TOP + simulation.schedule().ranks() as i32 * (ROW + GAP) + BOTTOM;
    render((WIDTH as u32, height as u32), |area| {
        let gantt = Gantt {
            area,
            columns: (LEFT, WIDTH - RIGHT),
            total: simulation.total(),
        };
        Chart { simulation, gantt }.draw()
    })
}

struct Chart<'a, 'b> {
    simulation: &'a Simulation,
    gantt: Gantt<'a, 'b>,
}

impl Chart<'_, '_> {
    fn draw(&self) -> DrawResult {
        self.gantt.area.fill(&WHITE).map_err(failed)?;
        let title = self.simulation.summary();
        let (name, figures) = title.split_once("; ").unwrap_or((&title, ""));
        self.gantt.text(name, (LEFT, 16), 20, HPos::Left)?;
        self.gantt.text(figures, (LEFT, 40), 15, HPos::Left)?;
        self.legend()?;
        let bottom = TOP + self.simulation.schedule().ranks() as i32 * (ROW + GAP);
        self.gantt.axis((TOP - 4, bottom), &self.unit())?;
        for (rank, timeline) in self.simulation.all_timelines().enumerate() {
            let top = TOP + rank as i32 * (ROW + GAP);
            let middle = (LEFT - 10, top + (ROW - STRIP) / 2 - 7);
            self.gantt
                .text(&format!("rank {rank}"), middle, 15, HPos::Right)?;
            self.gantt
                .rectangle((LEFT, top), (WIDTH - RIGHT, top + ROW), IDLE)?;
            for span in timeline.iter().filter(|span| span.end > span.start) {
                self.span(rank, top, span)?;
            }
        }
        Ok(())
    }

    fn span(&self, rank: usize, top: i32, span: &ActionSpan) -> DrawResult {
        let kind = span.action.kind;
        let (left, right) = (self.gantt.x(span.start), self.gantt.x(span.end));
        if kind.is_receive() {
            return Ok(()); // waiting is shown as an empty row
        }
        if kind.is_send() {
            let strip = ((left, top + ROW - STRIP), (right, top + ROW));
            return self.gantt.rectangle(strip.0, strip.1, color(kind));
        }
        let bottom = top + ROW - STRIP;
        let (chunk, chunks) = self.simulation.chunk(rank, span);
        let color = lighter(color(kind), chunk as f64 / chunks as f64);
        self.gantt.rectangle((left, top), (right, bottom), color)?;
        // A white edge separates adjacent computations that are wide enough.
        if right - left >= 4 {
            let edge = Rectangle::new([(left, top), (right, bottom)], WHITE.stroke_width(1));
            self.gantt.area.draw(&edge).map_err(failed)?;
        }
        let label = span.action.micro_batch.to_string();
        if right - left > 8 * label.len() as i32 + 2 {
            let middle = ((left + right) / 2, (top + bottom) / 2 - 7);
            self.gantt.text(&label, middle, 13, HPos::Center)?;
        }
        Ok(())
    }

    /// Draws a box for each kind, and the shades of later stages.
    fn legend(&self) -> DrawResult {
        let kinds = self.simulation.kinds();
        let ranks = 0..self.simulation.schedule().ranks();
        let chunks = ranks
            .map(|rank| self.simulation.stages_of(rank).len())
            .max();
        let drawn = |kind: &&ActionKind| !kind.is_receive() && kinds.contains(kind);
        let drawn = ActionKind::ALL.iter().filter(drawn).map(|kind| {
            let name = match kind {
                ActionKind::SendActivation => "activation in flight",
                ActionKind::SendGradient => "gradient in flight",
                kind => kind.description(),
            };
            (name, color(*kind))
        });
        let mut x = self.gantt.legend(63, drawn)?;
        let chunks = chunks.unwrap_or(1);
        if chunks > 1 {
            // Adjacent, like the chunks of a rank.
            for chunk in 0..chunks.min(MAX_SHADES) {
                let shade = lighter(color(ActionKind::Forward), chunk as f64 / chunks as f64);
                self.gantt.rectangle((x, 63), (x + 14, 77), shade)?;
                x += 14;
            }
            self.gantt
                .text("first to last stage of a rank", (x + 6, 63), 14, HPos::Left)?;
        }
        Ok(())
    }

    /// Returns the label of the time axis, which states the unit of time.
    fn unit(&self) -> String {
        let spans = self.simulation.all_timelines().flatten();
        let forwards = spans.filter(|span| span.action.kind.is_forward());
        let mut times = forwards.map(|span| number(span.end - span.start));
        match times.next() {
            Some(first) if times.all(|time| time == first) => {
                format!("time (a forward takes {first})")
            }
            _ => "time (in the unit of the times of the stages)".into(),
        }
    }
}

/// Returns the color of a kind of action.
fn color(kind: ActionKind) -> RGBColor {
    match kind {
        ActionKind::Forward | ActionKind::PairedForward => RGBColor(107, 163, 214),
        ActionKind::Backward => RGBColor(232, 150, 93),
        ActionKind::InputGradient => RGBColor(222, 178, 74),
        ActionKind::WeightGradient => RGBColor(121, 178, 110),
        ActionKind::SendActivation | ActionKind::ReceiveActivation => RGBColor(49, 88, 130),
        ActionKind::SendGradient | ActionKind::ReceiveGradient => RGBColor(150, 75, 25),
        ActionKind::ReduceGradients => IDLE,
    }
}

/// Mixes a color with white. 0 changes nothing, and 1 mixes in two thirds of white.
fn lighter(color: RGBColor, by: f64) -> RGBColor {
    let mix = |part: u8| (f64::from(part) + (255.0 - f64::from(part)) * by * 2.0 / 3.0) as u8;
    RGBColor(mix(color.0), mix(color.1), mix(color.2))
}

#[cfg(test)]
mod tests {
    use burn_megatron::pipeline::schedule::{
        ScheduleConfig, ScheduleKind, StageTimes, generate, simulate,
    };

    use super::*;

    fn simulated(config: &ScheduleConfig, times: [f64; 4]) -> Simulation {
        let schedule = generate(config).expect("runs");
        let [forward, input, weight, transfer] = times;
        let times = StageTimes::uniform(schedule.stages(), forward, input, weight, transfer);
        simulate(&schedule, &times).expect("valid")
    }

    #[test]
    fn any_times_can_be_drawn() {
        let config = ScheduleConfig::new(ScheduleKind::OneFOneB, 2, 2);
        for (forward, input) in [
            (0.0, 0.0),
            (0.0, 1.0),
            (1e-9, 1.0),
            (1e300, 1.0),
            (1e-300, 1e-300),
        ] {
            let simulation = simulated(&config, [forward, input, 0.0, 0.0]);
            let svg = schedule_chart(&simulation).expect("draws");
            assert!(svg.len() < 100_000 && !svg.contains("NaN"), "{}", svg.len());
        }
    }

    #[test]
    fn a_chart_has_a_box_for_each_computation_and_a_legend() {
        let simulation = simulated(
            &ScheduleConfig::new(ScheduleKind::ZbH1, 4, 8),
            [1.0, 1.0, 1.0, 0.25],
        );
        let svg = schedule_chart(&simulation).expect("draws");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        let names = [
            "zb-h1: 4 ranks, 4 stages, 8 micro-batches",
            "bubble",
            "forward",
            "input gradient",
            "weight gradient",
            "activation in flight",
            "gradient in flight",
            "rank 3",
            "time (a forward takes 1)",
        ];
        for name in names {
            assert!(svg.contains(name), "{name}");
        }
        assert!(!svg.contains("backward"));
        // One box for each of the 4 x 8 computations and for each transfer, and one in the legend.
        let boxes = |color: &str| svg.matches(&format!("fill=\"{color}\"")).count();
        assert_eq!(boxes("#6BA3D6"), 32 + 1);
        assert_eq!(boxes("#DEB24A"), 32 + 1);
        assert_eq!(boxes("#79B26E"), 32 + 1);
        assert_eq!(boxes("#315882"), 24 + 1);
        assert_eq!(boxes("#964B19"), 24 + 1);
    }

    #[test]
    fn a_chart_that_would_be_too_large() {
        let simulation = simulated(
            &ScheduleConfig::new(ScheduleKind::GPipe, 2, 40_000),
            [1.0, 1.0, 1.0, 0.0],
        );
        let message = schedule_chart(&simulation)
            .expect_err("too large")
            .to_string();
        assert!(
            message.contains("maximum of 200000: use fewer micro-batches"),
            "{message}"
        );
    }
}
