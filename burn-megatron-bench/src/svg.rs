//! Draws one step of each case as an SVG: the computation of a rank, and below it the transfers of its link.

use burn_megatron_cli::internal::Error;
use burn_megatron_plot::{Gantt, PlotError, failed, render};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use crate::timeline::{EventKind, TimelineEvent};

const WIDTH: i32 = 960;
const LEFT: i32 = 78;
const RIGHT: i32 = 14;
const TOP: i32 = 64;
const BOTTOM: i32 = 52;
/// The height of a row. `CASE` is the height of a case, which consists of a title and two rows.
const ROW: i32 = 18;
const CASE: i32 = 72;
const IDLE: RGBColor = RGBColor(246, 246, 246);

/// A case: its title, the events of one rank, and the step that is drawn.
pub struct Timeline<'a> {
    pub title: String,
    pub events: &'a [TimelineEvent],
    /// Start and end of the step in seconds.
    pub step: (f64, f64),
}

/// The colors with their names in the legend.
const COLORS: [(&str, RGBColor); 6] = [
    ("forward", RGBColor(107, 163, 214)),
    ("backward", RGBColor(232, 150, 93)),
    ("reduce, norm", RGBColor(154, 127, 184)),
    ("optimizer", RGBColor(121, 178, 110)),
    ("blocked", RGBColor(176, 48, 48)),
    ("link: transfer", RGBColor(49, 88, 130)),
];

fn color(event: &TimelineEvent) -> RGBColor {
    let index = match (event.kind, event.name.as_str()) {
        (EventKind::Compute, "forward") => 0,
        (EventKind::Compute, "backward") => 1,
        (EventKind::Reduce, _) => 2,
        (EventKind::Compute, _) => 3,
        (EventKind::Wait, _) => 4,
        (EventKind::Transfer, _) => 5,
    };
    COLORS[index].1
}

/// Draws all cases below each other on the same time scale. The SVG is 960 pixels wide.
///
/// A step is drawn from its start to its end, including work of the previous step that still runs.
pub fn svg(title: &str, timelines: &[Timeline]) -> Result<String, Error> {
    let lengths = timelines.iter().map(|line| line.step.1 - line.step.0);
    let bottom = TOP + CASE * timelines.len() as i32;
    let size = (WIDTH as u32, (bottom + BOTTOM) as u32);
    let svg = render(size, |area| {
        area.fill(&WHITE).map_err(failed)?;
        let gantt = Gantt {
            area,
            columns: (LEFT, WIDTH - RIGHT),
            total: lengths.fold(0.0, f64::max),
        };
        gantt.text(title, (LEFT, 8), 17, HPos::Left)?;
        gantt.legend(36, COLORS)?;
        gantt.axis((TOP, bottom), "seconds")?;
        let tops = (0..).map(|number| TOP + CASE * number);
        let mut lines = timelines.iter().zip(tops);
        lines.try_for_each(|(line, top)| draw(&gantt, line, top))
    });
    Ok(svg?)
}

fn draw(gantt: &Gantt, line: &Timeline, top: i32) -> Result<(), PlotError> {
    let (begin, end) = line.step;
    gantt.text(&line.title, (LEFT, top + 3), 14, HPos::Left)?;
    let rows = [top + 20, top + 20 + ROW + 3];
    for (y, name) in rows.into_iter().zip(["rank 0", "its link"]) {
        gantt.text(name, (LEFT - 8, y + 3), 13, HPos::Right)?;
        gantt.rectangle((LEFT, y), (gantt.x(end - begin), y + ROW), IDLE)?;
    }
    // Waits are drawn on top of the phases that wait.
    let order = [
        EventKind::Compute,
        EventKind::Reduce,
        EventKind::Wait,
        EventKind::Transfer,
    ];
    for kind in order {
        for event in line.events.iter().filter(|event| event.kind == kind) {
            let [from, to] = [event.start, event.end].map(|time| time.clamp(begin, end) - begin);
            if to > from {
                let y = rows[usize::from(kind == EventKind::Transfer)];
                let (left, right) = (gantt.x(from), gantt.x(to));
                gantt.rectangle((left, y), (right, y + ROW), color(event))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_drawn_with_what_runs_in_it() {
        let event = |kind, name: &str, start, end| TimelineEvent {
            kind,
            name: name.into(),
            step: 0,
            start,
            end,
        };
        let events = [
            event(EventKind::Compute, "forward", 1.0, 2.0),
            event(EventKind::Compute, "backward", 2.0, 4.0),
            event(EventKind::Transfer, "all_reduce", 0.5, 1.5),
            event(EventKind::Transfer, "all_reduce", 6.0, 7.0),
        ];
        let line = Timeline {
            title: "ZeRO-0".into(),
            events: &events,
            step: (1.0, 5.0),
        };
        let picture = svg("one step", &[line]).unwrap();
        // The count includes the box of the legend.
        let boxes = |color: &str| picture.matches(&format!("fill=\"{color}\"")).count();
        assert_eq!(
            ["#6BA3D6", "#E8965D", "#315882", "#B03030"].map(boxes),
            [2, 2, 2, 1]
        );
        assert!(picture.contains("ZeRO-0"), "{picture}");
    }
}
