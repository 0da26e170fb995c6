//! Charts as SVG: shared elements for the charts of all crates, and the chart of a pipeline schedule.

mod gantt;
mod schedule_chart;

use std::io;
use std::path::{Path, PathBuf};

use burn_megatron::atomic_file::replace_file;
use plotters::prelude::*;

pub use gantt::Gantt;
pub use schedule_chart::schedule_chart;

/// The font of all text.
pub const FONT: &str = "sans-serif";
/// The color of text and axes.
pub const TEXT: RGBColor = RGBColor(60, 60, 60);
/// The color of grid lines.
pub const FAINT: RGBColor = RGBColor(225, 225, 225);

/// The drawing area of a chart.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Reasons why a plot cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The drawing failed.
    #[error("cannot draw the plot: {0}")]
    Draw(String),
    /// An I/O error.
    #[error("cannot write '{path}': {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Draws an SVG of this size in pixels.
///
/// # Errors
///
/// The error of `draw`, or [`PlotError::Draw`].
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

/// Converts the error of a drawing operation.
pub fn failed(error: impl std::error::Error) -> PlotError {
    PlotError::Draw(error.to_string())
}

/// Writes a chart to a file. An existing file is replaced atomically.
///
/// # Errors
///
/// [`PlotError::Io`].
pub fn write(path: &Path, svg: &str) -> Result<(), PlotError> {
    replace_file(path, svg.as_bytes()).map_err(|source| PlotError::Io {
        path: path.to_path_buf(),
        source,
    })
}
