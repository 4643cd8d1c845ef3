document.querySelectorAll("select[data-panels]").forEach((select) => {
  select.addEventListener("change", () => {
    for (const panel of document.getElementById(select.dataset.panels).children) {
      panel.hidden = panel.dataset.panel !== select.value;
      panel.querySelectorAll(".plot").forEach(draw);
    }
  });
});

document.querySelectorAll("button[data-copy]").forEach((button) => {
  button.addEventListener("click", () => {
    // A page opened from disk may not use the clipboard interface; copying a selection always works.
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
});

// Tables sort by the numbers behind their texts. A second click reverses the order; blanks stay last.
document.querySelectorAll("table.sortable").forEach((table) => {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const rising = head.ariaSort !== "ascending";
    heads.forEach((other) => { other.ariaSort = other === head ? (rising ? "ascending" : "descending") : "none"; });
    const value = (row) => {
      const given = row.cells[column].dataset.value;
      return given === undefined ? row.cells[column].textContent : given === "" ? null : Number(given);
    };
    const compare = (a, b) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })) * (rising ? 1 : -1);
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }));
});
