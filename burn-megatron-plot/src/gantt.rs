//! Shared elements of Gantt charts: text, boxes, a legend and the time axis.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::{Area, FAINT, FONT, PlotError, TEXT, failed};

/// A point in a chart: the x and y coordinates in pixels.
pub type Point = (i32, i32);

/// A Gantt chart: a drawing area in which time runs from left to right.
pub struct Gantt<'a, 'b> {
    /// The drawing area.
    pub area: &'a Area<'b>,
    /// The x coordinates of the start and the end of the time axis, in pixels.
    pub columns: (i32, i32),
    /// The time at the end of the time axis.
    pub total: f64,
}

impl Gantt<'_, '_> {
    /// Returns the x coordinate of a time in pixels. Times after the end of the time axis are clamped to the end.
    pub fn x(&self, time: f64) -> i32 {
        let (left, right) = self.columns;
        let part = if self.total > 0.0 {
            time / self.total
        } else {
            0.0
        };
        left + (part.min(1.0) * f64::from(right - left)).round() as i32
    }

    /// Draws a filled box between the points `from` and `to`.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if drawing fails.
    pub fn rectangle(&self, from: Point, to: Point, color: RGBColor) -> Result<(), PlotError> {
        let filled = Rectangle::new([from, to], color.filled());
        self.area.draw(&filled).map_err(failed)
    }

    /// Draws text with the font size `size` below the point `at`. `from` is the horizontal alignment.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if drawing fails.
    pub fn text(&self, text: &str, at: Point, size: i32, from: HPos) -> Result<(), PlotError> {
        let style = (FONT, size).into_font().color(&TEXT);
        let style = style.pos(Pos::new(from, VPos::Top));
        let text = Text::new(text.to_string(), at, style);
        self.area.draw(&text).map_err(failed)
    }

    /// Draws a legend with a box and a name for each color. Returns the x coordinate at the end of the legend.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if drawing fails.
    pub fn legend<'n>(
        &self,
        top: i32,
        colors: impl IntoIterator<Item = (&'n str, RGBColor)>,
    ) -> Result<i32, PlotError> {
        let mut x = self.columns.0;
        for (name, color) in colors {
            self.rectangle((x, top), (x + 14, top + 14), color)?;
            self.text(name, (x + 20, top), 14, HPos::Left)?;
            x += 44 + 7 * name.len() as i32;
        }
        Ok(x)
    }

    /// Draws the time axis: vertical grid lines at round times from `top` to `bottom`, and the times and their unit
    /// below.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if drawing fails.
    pub fn axis(&self, (top, bottom): (i32, i32), unit: &str) -> Result<(), PlotError> {
        let step = round_step(self.total / 12.0);
        let ticks = if self.total > 0.0 {
            (self.total / step).floor() as usize
        } else {
            0
        };
        for tick in 0..=ticks {
            let x = self.x(tick as f64 * step);
            let line = PathElement::new([(x, top), (x, bottom)], FAINT);
            self.area.draw(&line).map_err(failed)?;
            let label = number(tick as f64 * step);
            self.text(&label, (x, bottom + 4), 13, HPos::Center)?;
        }
        let (left, right) = self.columns;
        self.text(unit, ((left + right) / 2, bottom + 26), 14, HPos::Center)
    }
}

/// Returns the smallest number that is at least `least` and is 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    if least <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    steps
        .into_iter()
        .find(|step| *step >= least)
        .unwrap_or(10.0 * power)
}

/// Formats a number with up to 3 decimal places.
pub fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(round_step(0.11), 0.2);
        assert_eq!(round_step(3.0), 5.0);
        assert!((round_step(0.06) - 0.1).abs() < 1e-12);
    }
}
