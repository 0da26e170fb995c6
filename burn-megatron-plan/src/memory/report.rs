//! Formats the report as a table.

use std::fmt;

use super::MemoryReport;
use burn_megatron::data_parallel::format_bytes;
use burn_megatron::text_table::Table;

impl fmt::Display for MemoryReport {
    /// Writes a table with one row per pipeline rank. A row shows the kinds of memory at the peak, the total, the bytes
    /// on the host (if there are any), and the action at which the peak occurs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = self.fullest().1.peak.kinds();
        let shown: Vec<usize> = (0..kinds.len())
            .filter(|kind| self.ranks.iter().any(|rank| rank.peak.kinds()[*kind].1 > 0))
            .collect();
        let mut head = vec!["pipeline rank".to_string()];
        head.extend(shown.iter().map(|kind| kinds[*kind].0.to_string()));
        head.push("total".into());
        let ranks = self.ranks.iter().zip(&self.states);
        let on_host = ranks.map(|(rank, state)| rank.host_activations + state.host_optimizer);
        let on_host: Vec<_> = on_host.collect();
        let is_offloaded = on_host.iter().any(|bytes| *bytes > 0);
        head.extend(is_offloaded.then(|| "on the host".into()));
        head.push("at".into());
        let rows = self.ranks.iter().enumerate().map(|(number, rank)| {
            let all = rank.peak.kinds();
            let mut row = vec![number.to_string()];
            row.extend(shown.iter().map(|kind| format_bytes(all[*kind].1)));
            row.push(format_bytes(rank.peak.total()));
            row.extend(is_offloaded.then(|| format_bytes(on_host[number])));
            row.push(match &rank.at {
                Some(action) => action.describe(),
                None => "the optimizer's step".into(),
            });
            row
        });
        f.write_str(&Table::new(std::iter::once(head).chain(rows)).fit(None))
    }
}
