//! One step of each case as an SVG: what a rank computes, and below it what its link transfers.

use std::fmt::Write;

use crate::timeline::{EventKind, TimelineEvent};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 44.0;
/// The height of a row, and of a case with its title and its two rows.
const ROW: f64 = 18.0;
const CASE: f64 = 72.0;

/// A case: its title, the events of one rank, and the step that is drawn.
pub struct Timeline<'a> {
    pub title: String,
    pub events: &'a [TimelineEvent],
    /// Start and end of the step in seconds.
    pub step: (f64, f64),
}

/// Draws all cases below each other, on the same time scale, 960 pixels wide.
///
/// A step is drawn from its start to its end, with what still runs from the step before.
pub fn svg(title: &str, timelines: &[Timeline]) -> String {
    let lengths = timelines.iter().map(|line| line.step.1 - line.step.0);
    let longest = lengths.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let mut drawing = Drawing {
        text: String::new(),
        scale: (WIDTH - LEFT - RIGHT) / longest,
    };
    let height = TOP + CASE * timelines.len() as f64 + BOTTOM;
    drawing.begin(height);
    drawing.label(LEFT, 22.0, "h", title);
    drawing.legend();
    drawing.axis(longest, height - BOTTOM);
    for (number, line) in timelines.iter().enumerate() {
        drawing.timeline(line, TOP + CASE * number as f64);
    }
    drawing.text.push_str("</svg>\n");
    drawing.text
}

struct Drawing {
    text: String,
    /// Pixels of a second.
    scale: f64,
}

/// The class of a rectangle, its colour, and its name in the legend.
const CLASSES: [(&str, &str, &str); 6] = [
    ("f", "#6ba3d6", "forward"),
    ("b", "#e8965d", "backward"),
    ("r", "#9a7fb8", "reduce, norm"),
    ("o", "#79b26e", "optimizer"),
    ("w", "#b03030", "blocked"),
    ("t", "#315882", "link: transfer"),
];

fn class(event: &TimelineEvent) -> &'static str {
    match (event.kind, event.name.as_str()) {
        (EventKind::Wait, _) => "w",
        (EventKind::Transfer, _) => "t",
        (EventKind::Reduce, _) => "r",
        (EventKind::Compute, "forward") => "f",
        (EventKind::Compute, "backward") => "b",
        (EventKind::Compute, _) => "o",
    }
}

/// Writing to a string cannot fail.
macro_rules! put {
    ($drawing:expr, $($argument:tt)*) => {
        let _ = writeln!($drawing.text, $($argument)*);
    };
}

impl Drawing {
    fn begin(&mut self, height: f64) {
        put!(
            self,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">"#
        );
        self.text
            .push_str("<style>text{font:13px sans-serif;fill:#3c3c3c}.h{font-size:17px}");
        self.text
            .push_str(".e{text-anchor:end}.m{text-anchor:middle}");
        self.text
            .push_str(".t{stroke:#fff;stroke-width:.6}.i{fill:#f6f6f6}.a{stroke:#e1e1e1}");
        for (class, color, _) in CLASSES {
            put!(self, ".{class}{{fill:{color}}}");
        }
        put!(
            self,
            r#"</style><rect width="{WIDTH}" height="{height}" fill="white"/>"#
        );
    }

    fn label(&mut self, x: f64, y: f64, class: &str, text: &str) {
        put!(
            self,
            r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{text}</text>"#
        );
    }

    fn rectangle(&mut self, x: f64, y: f64, width: f64, height: f64, class: &str) {
        put!(
            self,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height}" class="{class}"/>"#
        );
    }

    fn legend(&mut self) {
        let mut x = LEFT;
        for (class, _, name) in CLASSES {
            self.rectangle(x, 36.0, 13.0, 13.0, class);
            self.label(x + 18.0, 47.0, "", name);
            x += 44.0 + 7.0 * name.len() as f64;
        }
    }

    fn axis(&mut self, longest: f64, bottom: f64) {
        let tick = round_step(longest / 12.0);
        for number in 0..=(longest / tick) as usize {
            let seconds = number as f64 * tick;
            let x = LEFT + seconds * self.scale;
            put!(self, r#"<path d="M{x:.1} {TOP}V{bottom}" class="a"/>"#);
            let label = format!("{:.2}", seconds);
            let label = label.trim_end_matches('0').trim_end_matches('.');
            self.label(x, bottom + 15.0, "m", label);
        }
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        self.label(middle, bottom + 34.0, "m", "seconds");
    }

    fn timeline(&mut self, line: &Timeline, top: f64) {
        let (begin, end) = line.step;
        self.label(LEFT, top + 14.0, "", &line.title);
        let rows = [top + 20.0, top + 20.0 + ROW + 3.0];
        for (y, name) in rows.into_iter().zip(["rank 0", "its link"]) {
            self.label(LEFT - 8.0, y + 13.0, "e", name);
            self.rectangle(LEFT, y, (end - begin) * self.scale, ROW, "i");
        }
        // What a phase waits for is drawn on top of it.
        let order = [
            EventKind::Compute,
            EventKind::Reduce,
            EventKind::Wait,
            EventKind::Transfer,
        ];
        for kind in order {
            for event in line.events.iter().filter(|event| event.kind == kind) {
                let from = (event.start.max(begin) - begin) * self.scale;
                let width = (event.end.min(end) - begin) * self.scale - from;
                // Nothing thinner can be seen.
                if width >= 0.1 {
                    let row = usize::from(kind == EventKind::Transfer);
                    self.rectangle(LEFT + from, rows[row], width, ROW, class(event));
                }
            }
        }
    }
}

/// 1, 2 or 5 times a power of ten, the next one up.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    let fits = steps.into_iter().find(|step| *step >= least);
    fits.unwrap_or(10.0 * power)
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
        let picture = svg("one step", &[line]);
        let pixels = (WIDTH - LEFT - RIGHT) / 4.0;
        let drawn = |class: &str| {
            let end = format!(r#"height="18" class="{class}"/>"#);
            picture.lines().filter(|text| text.ends_with(&end)).count()
        };
        assert_eq!(["f", "b", "t", "w"].map(drawn), [1, 1, 1, 0]);
        // Of the transfer that began before the step, the half is left.
        let half = format!(r#"x="{LEFT:.1}" y="105.0" width="{:.1}""#, 0.5 * pixels);
        assert!(picture.contains(&half), "{picture}");
        assert!(picture.contains(">ZeRO-0</text>"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(round_step(0.11), 0.2);
        assert_eq!(round_step(3.0), 5.0);
        assert!((round_step(0.06) - 0.1).abs() < 1e-12);
    }
}
