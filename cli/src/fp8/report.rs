//! Reports the quantization of the operands of FP8 layers in the last step.

use std::collections::BTreeMap;

use burn_megatron::atomic_file::replace_file;
use burn_megatron::comm::{Communicator, all_gather_bytes};
use burn_megatron::nn::fp8::{Operand, OperandReport};
use burn_megatron::text_table::Table;
use burn_megatron_train::run_folder::RunFolder;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::terminal;

/// Quantization of an operand of a layer, with the worst values of the ranks that share it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperandLine {
    layer: String,
    operand: Operand,
    recipe: String,
    format: String,
    amax: f64,
    /// The smallest and the largest scale.
    scale: (f32, f32),
    saturated: f64,
    flushed: f64,
    /// The signal-to-noise ratio in decibels, or `None` if the quantization was exact.
    snr_db: Option<f64>,
}

impl From<OperandReport> for OperandLine {
    fn from(report: OperandReport) -> Self {
        Self {
            layer: report.path,
            operand: report.operand,
            recipe: report.recipe.into(),
            format: format!("{:?}", report.format),
            amax: report.amax,
            scale: report.scale,
            saturated: report.saturated,
            flushed: report.flushed,
            snr_db: report.snr_db.is_finite().then_some(report.snr_db),
        }
    }
}

impl OperandLine {
    /// Merges the values of another rank, keeping the worse value of each.
    fn add(&mut self, other: &Self) {
        self.amax = self.amax.max(other.amax);
        self.scale.0 = self.scale.0.min(other.scale.0);
        self.scale.1 = self.scale.1.max(other.scale.1);
        self.saturated = self.saturated.max(other.saturated);
        self.flushed = self.flushed.max(other.flushed);
        self.snr_db = match (self.snr_db, other.snr_db) {
            (Some(own), Some(other)) => Some(own.min(other)),
            (own, other) => own.or(other),
        };
    }
}

/// Gathers the reports of all ranks on every rank. Collective: call on all ranks.
pub fn gather(
    world: &dyn Communicator,
    own: Vec<OperandReport>,
) -> Result<Vec<OperandLine>, Error> {
    let own: Vec<OperandLine> = own.into_iter().map(OperandLine::from).collect();
    let all = all_gather_bytes(world, &serde_json::to_vec(&own)?)?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
    Ok(merge(all.collect::<Result<Vec<_>, _>>()?))
}

/// Merges the lines into one per operand, in the order of first occurrence.
fn merge(ranks: Vec<Vec<OperandLine>>) -> Vec<OperandLine> {
    let mut merged: Vec<OperandLine> = vec![];
    let mut places = BTreeMap::new();
    for line in ranks.into_iter().flatten() {
        let place = *places
            .entry((line.layer.clone(), line.operand))
            .or_insert(merged.len());
        match merged.get_mut(place) {
            Some(known) => known.add(&line),
            None => merged.push(line),
        }
    }
    merged
}

/// Prints the table, and writes the report to the run folder.
pub fn write(folder: &RunFolder, lines: &[OperandLine]) -> Result<(), Error> {
    if lines.is_empty() {
        return Ok(());
    }
    println!("FP8 operands of the last step; the worst of the ranks that share one\n");
    println!("{}\n", table(lines).fit(terminal::width()));
    let path = folder.path().join("fp8.json");
    let failed = |error| format!("cannot write {}: {error}", path.display());
    replace_file(&path, &serde_json::to_vec_pretty(lines)?).map_err(failed)?;
    Ok(())
}

const HEAD: [&str; 9] = [
    "layer",
    "operand",
    "recipe",
    "format",
    "amax",
    "scale",
    "saturated",
    "flushed",
    "SNR",
];

fn table(lines: &[OperandLine]) -> Table {
    let rows = lines.iter().map(row);
    let rows = std::iter::once(HEAD.map(String::from)).chain(rows);
    // On a narrow terminal, drop the recipe first, then the magnitude, then the scale.
    Table::new(rows.map(|row| row.to_vec()))
        .with_left(0..4)
        .with_optional([2, 4, 5])
}

fn row(line: &OperandLine) -> [String; HEAD.len()] {
    let (least, most) = line.scale;
    let scale = if least == most {
        format!("{least:.3e}")
    } else {
        format!("{least:.1e} to {most:.1e}")
    };
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let snr = line.snr_db.map(|snr| format!("{snr:.1} dB"));
    [
        line.layer.clone(),
        line.operand.to_string(),
        line.recipe.clone(),
        line.format.clone(),
        format!("{:.3e}", line.amax),
        scale,
        percent(line.saturated),
        percent(line.flushed),
        snr.unwrap_or_else(|| "exact".into()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(layer: &str, amax: f64, snr_db: Option<f64>) -> OperandLine {
        OperandLine {
            layer: layer.into(),
            operand: Operand::Input,
            recipe: "delayed".into(),
            format: "E4M3".into(),
            amax,
            scale: (2.0, 2.0),
            saturated: amax / 1000.0,
            flushed: 0.0,
            snr_db,
        }
    }

    #[test]
    fn of_ranks_that_share_an_operand_the_worst_is_told() {
        let ranks = vec![
            vec![line("a", 1.0, None), line("b", 2.0, Some(30.0))],
            vec![line("a", 4.0, Some(31.0)), line("b", 1.0, Some(28.0))],
            vec![line("c", 1.0, None)],
        ];
        let merged = merge(ranks);
        let of = |line: &OperandLine| (line.layer.clone(), line.amax, line.snr_db);
        let found: Vec<_> = merged.iter().map(of).collect();
        let wanted = [
            ("a", 4.0, Some(31.0)),
            ("b", 2.0, Some(28.0)),
            ("c", 1.0, None),
        ];
        assert_eq!(
            found,
            wanted.map(|(layer, amax, snr)| (layer.to_string(), amax, snr))
        );
    }

    #[test]
    fn the_table_has_a_line_for_each_operand() {
        let mut blocks = line("blocks.0.mlp.up", 3.25, None);
        blocks.scale = (1.0, 64.0);
        let text = table(&[blocks, line("x", 0.5, Some(31.04))]).fit(None);
        insta::assert_snapshot!(text, @"
        layer            operand  recipe   format      amax           scale  saturated  flushed      SNR
        blocks.0.mlp.up  input    delayed  E4M3     3.250e0  1.0e0 to 6.4e1     0.33 %   0.00 %    exact
        x                input    delayed  E4M3    5.000e-1         2.000e0     0.05 %   0.00 %  31.0 dB
        ");
    }
}
