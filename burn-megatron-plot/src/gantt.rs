//! Shared elements of charts of work over time: text, boxes, a legend and the time axis.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::{Area, FAINT, FONT, PlotError, TEXT, failed};

/// A point in pixels.
pub type Point = (i32, i32);

/// The drawing area of a chart whose time goes from left to right.
pub struct Gantt<'a, 'b> {
    /// The drawing area.
    pub area: &'a Area<'b>,
    /// The pixels at which the time starts and ends.
    pub columns: (i32, i32),
    /// The time at the last pixel.
    pub total: f64,
}

impl Gantt<'_, '_> {
    /// Returns the pixel of a time. Later times are clamped to the last pixel.
    pub fn x(&self, time: f64) -> i32 {
        let (left, right) = self.columns;
        let part = if self.total > 0.0 {
            time / self.total
        } else {
            0.0
        };
        left + (part.min(1.0) * f64::from(right - left)).round() as i32
    }

    /// Draws a filled box.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
    pub fn rectangle(&self, from: Point, to: Point, color: RGBColor) -> Result<(), PlotError> {
        let filled = Rectangle::new([from, to], color.filled());
        self.area.draw(&filled).map_err(failed)
    }

    /// Writes text of this font size below a point.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
    pub fn text(&self, text: &str, at: Point, size: i32, from: HPos) -> Result<(), PlotError> {
        let style = (FONT, size).into_font().color(&TEXT);
        let style = style.pos(Pos::new(from, VPos::Top));
        let text = Text::new(text.to_string(), at, style);
        self.area.draw(&text).map_err(failed)
    }

    /// Draws a box and a name for each color. Returns the x coordinate after them.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
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

    /// Draws lines at round times over these rows. The times and their unit are written below.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
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

/// Returns the smallest number of at least `least` that is 1, 2 or 5 times a power of ten.
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

/// Formats a number with at most 3 decimals.
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
