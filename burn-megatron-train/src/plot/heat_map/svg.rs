//! The heat map as SVG.
//!
//! Colors get darker with the load, so that they are distinguishable by lightness alone. The even share is gray.

use burn_megatron_plot::{Area, FONT, PlotError, TEXT, failed, render};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::super::svg::WIDTH;
use super::{ExpertHeatMap, HeatCells};

const RIGHT: i32 = 32;
const TOP: i32 = 124;
const BOTTOM: i32 = 64;
/// The height of all rows in pixels, if the row height is then in the range of [`ROW`].
const ROWS: i32 = 360;
const ROW: (i32, i32) = (14, 44);
/// The maximum number of cells per row: more cells would be too narrow to see.
const MAX_CELLS: usize = 256;
/// The minimum width of a cell with a white edge.
const EDGED: i32 = 8;
/// The minimum size of a cell with its number.
const NUMBERED: (i32, i32) = (36, 18);
/// The maximum number of labels on the horizontal axis.
const LABELS: usize = 16;

/// Upper limits of the colors, as multiples of the even share. Larger loads have the last color.
const LIMITS: [f64; 8] = [0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 4.0];
const COLORS: [RGBColor; 9] = [
    RGBColor(232, 246, 255),
    RGBColor(205, 235, 255),
    RGBColor(178, 221, 249),
    RGBColor(180, 208, 227),
    RGBColor(190, 190, 190),
    RGBColor(232, 164, 104),
    RGBColor(207, 114, 47),
    RGBColor(153, 67, 15),
    RGBColor(82, 29, 0),
];
/// The index of the first color on which numbers are white.
const DARK: usize = 6;

type Point = (i32, i32);

pub(super) fn draw(map: &ExpertHeatMap) -> Result<String, PlotError> {
    let rows = map.rows.len().max(1) as i32;
    let row = (ROWS / rows).clamp(ROW.0, ROW.1);
    let height = TOP + rows * row + BOTTOM;
    render((WIDTH, height as u32), |area| {
        let cells = map.cells(MAX_CELLS);
        let names = map.rows.iter().map(|row| row.layer.chars().count()).max();
        let left = 32 + 8 * names.unwrap_or(0).clamp("layer".len(), 40) as i32;
        Picture {
            map,
            cells,
            area,
            left,
            row,
        }
        .draw()
    })
}

struct Picture<'a, 'b> {
    map: &'a ExpertHeatMap,
    cells: HeatCells,
    area: &'a Area<'b>,
    /// The left edge of the first cell.
    left: i32,
    /// The height of a row.
    row: i32,
}

impl Picture<'_, '_> {
    fn draw(&self) -> Result<(), PlotError> {
        self.area.fill(&WHITE).map_err(failed)?;
        let mut title = self.map.title();
        title[..1].make_ascii_uppercase();
        self.text(&title, (WIDTH as i32 / 2, 18), 24, HPos::Center, TEXT)?;
        self.legend()?;
        self.text("layer", (self.left - 10, TOP - 22), 17, HPos::Right, TEXT)?;
        for (number, row) in self.map.rows.iter().enumerate() {
            let top = TOP + number as i32 * self.row;
            let size = 15.min(self.row);
            let middle = (self.left - 10, top + (self.row - size) / 2);
            self.text(&row.layer, middle, size, HPos::Right, TEXT)?;
            self.cells_of(number, top)?;
        }
        self.axis()
    }

    /// Draws the cells of a row. Narrow neighbours of the same color are drawn as one rectangle.
    fn cells_of(&self, number: usize, top: i32) -> Result<(), PlotError> {
        let places: Vec<_> = self.cells.rows[number]
            .iter()
            .map(|share| place(*share))
            .collect();
        let is_edged = self.width() >= EDGED;
        let mut first = 0;
        for run in places.chunk_by(|a, b| !is_edged && a == b) {
            let (left, right) = (self.x(first), self.x(first + run.len()));
            if let Some(place) = run[0] {
                let edge = i32::from(is_edged);
                let to = (right - edge, top + self.row - edge);
                self.rectangle((left, top), to, COLORS[place])?;
                self.number(self.cells.rows[number][first], place, (left, top))?;
            }
            first += run.len();
        }
        Ok(())
    }

    /// Draws the number in a cell, if it fits.
    fn number(&self, share: f64, place: usize, at: Point) -> Result<(), PlotError> {
        if self.width() < NUMBERED.0 || self.row < NUMBERED.1 {
            return Ok(());
        }
        let color = if place >= DARK { WHITE } else { BLACK };
        let middle = (at.0 + self.width() / 2, at.1 + (self.row - 14) / 2);
        self.text(&format!("{share:.2}"), middle, 14, HPos::Center, color)
    }

    /// Draws the expert numbers below the cells, and the name of the axis.
    fn axis(&self) -> Result<(), PlotError> {
        let bottom = TOP + self.map.rows.len() as i32 * self.row;
        let experts = self.cells.columns * self.cells.experts;
        let step = experts.div_ceil(LABELS).next_power_of_two();
        let longest = self.map.rows.iter().map(|row| row.shares.len()).max();
        for expert in (0..longest.unwrap_or(0)).step_by(step) {
            let cell = expert / self.cells.experts;
            let middle = (self.x(cell) + self.x(cell + 1)) / 2;
            self.text(
                &expert.to_string(),
                (middle, bottom + 6),
                15,
                HPos::Center,
                TEXT,
            )?;
        }
        let middle = (self.left + WIDTH as i32 - RIGHT) / 2;
        let label = self.cells.label();
        self.text(&label, (middle, bottom + 30), 17, HPos::Center, TEXT)
    }

    /// Draws the colors with the limits between them.
    fn legend(&self) -> Result<(), PlotError> {
        let (width, height, top) = (44, 14, 58);
        let left = WIDTH as i32 - RIGHT - width * COLORS.len() as i32;
        let label = "multiple of the even share";
        self.text(label, (left - 12, top - 1), 15, HPos::Right, TEXT)?;
        for (place, color) in (0..).zip(COLORS) {
            let at = (left + place * width, top);
            self.rectangle(at, (at.0 + width, top + height), color)?;
        }
        for (place, limit) in (1..).zip(LIMITS) {
            let at = (left + place * width, top + height + 4);
            self.text(&limit.to_string(), at, 14, HPos::Center, TEXT)?;
        }
        Ok(())
    }

    /// Returns the left edge of a cell.
    fn x(&self, cell: usize) -> i32 {
        let all = i64::from(WIDTH as i32 - RIGHT - self.left);
        let columns = self.cells.columns.max(1) as i64;
        self.left + (cell as i64 * all / columns) as i32
    }

    /// Returns the width of a cell, in pixels.
    fn width(&self) -> i32 {
        self.x(1) - self.left
    }

    fn rectangle(&self, from: Point, to: Point, color: RGBColor) -> Result<(), PlotError> {
        let shape = Rectangle::new([from, to], color.filled());
        self.area.draw(&shape).map_err(failed)
    }

    fn text(
        &self,
        text: &str,
        at: Point,
        size: i32,
        from: HPos,
        color: RGBColor,
    ) -> Result<(), PlotError> {
        let style = (FONT, size).into_font().color(&color);
        let style = style.pos(Pos::new(from, VPos::Top));
        let shape = Text::new(text.to_string(), at, style);
        self.area.draw(&shape).map_err(failed)
    }
}

/// Returns the index of the color of a load; `None` without a load.
fn place(share: f64) -> Option<usize> {
    let reached = LIMITS.iter().filter(|limit| share >= **limit);
    (!share.is_nan()).then_some(reached.count())
}
