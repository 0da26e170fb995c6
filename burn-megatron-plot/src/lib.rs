//! Draws SVG charts: shared elements for the charts of all burn-megatron crates, and the chart of a pipeline schedule.

mod gantt;
mod schedule_chart;

use std::io;
use std::path::{Path, PathBuf};

use burn_megatron::atomic_file::replace_file;
use plotters::prelude::*;

pub use gantt::Gantt;
pub use schedule_chart::schedule_chart;

/// The font of all text in charts.
pub const FONT: &str = "sans-serif";
/// The color of text and axes in charts.
pub const TEXT: RGBColor = RGBColor(60, 60, 60);
/// The color of grid lines in charts.
pub const FAINT: RGBColor = RGBColor(225, 225, 225);

/// The drawing area of a chart.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// An error of drawing or writing a chart.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The chart could not be drawn.
    #[error("cannot draw the plot: {0}")]
    Draw(String),
    /// The file could not be written.
    #[error("cannot write '{path}': {source}")]
    Io {
        /// The path of the file.
        path: PathBuf,
        /// The cause of the error.
        source: io::Error,
    },
}

/// Draws a chart with the function `draw`, and returns it as SVG. `size` is the width and the height in pixels.
///
/// # Errors
///
/// The error that `draw` returns, or [`PlotError::Draw`] if the SVG cannot be created.
pub fn render(
    size: (u32, u32),
    draw: impl FnOnce(&Area<'_>) -> Result<(), PlotError>,
) -> Result<String, PlotError> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        draw(&area)?;
        area.present().map_err(failed)?;
    }
    Ok(text)
}

/// Converts the error of a drawing operation to a [`PlotError::Draw`].
pub fn failed(error: impl std::error::Error) -> PlotError {
    PlotError::Draw(error.to_string())
}

/// Writes the SVG of a chart to a file. An existing file is replaced atomically.
///
/// # Errors
///
/// [`PlotError::Io`] if the file cannot be written.
pub fn write(path: &Path, svg: &str) -> Result<(), PlotError> {
    replace_file(path, svg.as_bytes()).map_err(|source| PlotError::Io {
        path: path.to_path_buf(),
        source,
    })
}
