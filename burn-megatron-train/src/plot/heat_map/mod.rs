//! The load of the experts of a step as a heat map: experts across, layers down.

mod svg;
mod terminal;
#[cfg(test)]
mod tests;

use std::path::Path;

use crate::expert_metrics::{ExpertLoad, even_shares};
use crate::metrics::MetricsRecord;
use burn_megatron_plot::{PlotError, write};

/// The load of the experts of a step, each as a multiple of the even share of its layer.
///
/// If there are more experts than fit, a cell is the mean of several neighbours, and the axis says of how many.
/// A layer without tokens is empty.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertHeatMap {
    step: usize,
    rows: Vec<LayerRow>,
}

#[derive(Debug, Clone, PartialEq)]
struct LayerRow {
    layer: String,
    /// Multiples of the even share.
    shares: Vec<f64>,
}

/// The cells of a heat map.
struct HeatCells {
    /// The experts of a cell; the last of a row may have fewer.
    experts: usize,
    /// The cells of the longest row.
    columns: usize,
    /// By layer, the mean of each cell.
    rows: Vec<Vec<f64>>,
}

impl ExpertHeatMap {
    /// The heat map of a step.
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

    /// The last load of a metrics file, from [`read_metrics`](crate::metrics::read_metrics); `None` if it
    /// has none.
    pub fn from_records(records: &[MetricsRecord]) -> Option<Self> {
        records.iter().rev().find_map(|record| match record {
            MetricsRecord::ExpertLoad(load) => Some(Self::new(load)),
            _ => None,
        })
    }

    /// The heat map as an SVG 960 pixels wide, with the numbers where they fit.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`].
    pub fn svg(&self) -> Result<String, PlotError> {
        svg::draw(self)
    }

    /// Writes [`ExpertHeatMap::svg`] to a file.
    ///
    /// # Errors
    ///
    /// [`PlotError::Draw`] or [`PlotError::Io`].
    pub fn write_svg(&self, path: &Path) -> Result<(), PlotError> {
        write(path, &self.svg()?)
    }

    /// The heat map in shades of text: four lines and one per layer, at most `columns` (and at least 40)
    /// characters wide.
    pub fn terminal(&self, columns: usize) -> String {
        terminal::draw(self, columns)
    }

    /// The title.
    fn title(&self) -> String {
        format!("load of the experts in step {}", self.step)
    }

    /// At most `most` cells per row.
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
    /// The label of the horizontal axis.
    fn label(&self) -> String {
        match self.experts {
            1 => "expert".into(),
            n => format!("expert (a cell is the mean of {n})"),
        }
    }
}
