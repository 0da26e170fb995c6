//! A heat map of the expert load of a step, with one column per expert and one row per layer.

mod svg;
mod terminal;
#[cfg(test)]
mod tests;

use std::path::Path;

use crate::expert_metrics::{ExpertLoad, even_shares};
use crate::metrics::MetricsRecord;
use burn_megatron_plot::{PlotError, write};

/// A heat map of the expert load of a step. Each load is divided by the even share, which is the load of each expert of
/// the layer if all loads are equal.
///
/// If there are too many experts, a cell shows the mean of several adjacent experts, and the label of the axis shows
/// the number of experts per cell. The row of a layer without tokens is empty.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertHeatMap {
    step: usize,
    rows: Vec<LayerRow>,
}

#[derive(Debug, Clone, PartialEq)]
struct LayerRow {
    layer: String,
    /// The load of each expert as a multiple of the even share.
    shares: Vec<f64>,
}

/// The cells of a heat map.
struct HeatCells {
    /// The number of experts per cell; the last cell of a row may have fewer.
    experts: usize,
    /// The number of cells of the longest row.
    columns: usize,
    /// The mean of each cell, per layer.
    rows: Vec<Vec<f64>>,
}

impl ExpertHeatMap {
    /// Creates the heat map from the expert load of a step.
    pub fn new(load: &ExpertLoad) -> Self {
        let rows = load.layers.iter().map(|layer| LayerRow {
            layer: layer.layer.clone(),
            shares: even_shares(&layer.load).collect(),
        });
        Self {
            step: load.step,
            rows: rows.collect(),
        }
    }

    /// Creates the heat map from the last expert load in the records of a metrics file, which
    /// [`read_metrics`](crate::metrics::read_metrics) returns. Returns `None` if there is no expert load.
    pub fn from_records(records: &[MetricsRecord]) -> Option<Self> {
        records.iter().rev().find_map(|record| match record {
            MetricsRecord::ExpertLoad(load) => Some(Self::new(load)),
            _ => None,
        })
    }

    /// Returns the heat map as an SVG that is 960 pixels wide. Cells contain their values if they are large enough.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if the heat map cannot be drawn.
    pub fn svg(&self) -> Result<String, PlotError> {
        svg::draw(self)
    }

    /// Writes the SVG of the heat map to a file: see [`svg`](Self::svg).
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] if the heat map cannot be drawn, and [`PlotError::Io`] if the file cannot be written.
    pub fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        write(path, &self.svg()?)
    }

    /// Returns the heat map as text with shaded cells. It has one line per layer and four more lines. The maximum line
    /// width is `columns` characters, or 40 characters if `columns` is smaller than 40.
    pub fn terminal(&self, columns: usize) -> String {
        terminal::draw(self, columns)
    }

    /// Returns the title.
    fn title(&self) -> String {
        format!("load of the experts in step {}", self.step)
    }

    /// Returns cells, at most `most` per row.
    fn cells(&self, most: usize) -> HeatCells {
        let longest = self.rows.iter().map(|row| row.shares.len()).max();
        let longest = longest.unwrap_or(0);
        let experts = longest.div_ceil(most).max(1);
        let mean = |cell: &[f64]| cell.iter().sum::<f64>() / cell.len() as f64;
        let row = |row: &LayerRow| row.shares.chunks(experts).map(mean).collect();
        HeatCells {
            experts,
            columns: longest.div_ceil(experts),
            rows: self.rows.iter().map(row).collect(),
        }
    }
}

impl HeatCells {
    /// Returns the label of the horizontal axis.
    fn label(&self) -> String {
        match self.experts {
            1 => "expert".into(),
            n => format!("expert (a cell is the mean of {n})"),
        }
    }
}
