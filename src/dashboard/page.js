(() => {
  const live = document.getElementById('live');
  const say = (text) => { live.textContent = '· ' + text; };
  let timer = null, again = false;
  const refresh = async () => {
    try {
      const headers = { 'Accept': 'text/html', 'X-Abide-Background': '1' };
      const answer = await fetch('/', { cache: 'no-store', headers });
      // The session has ended.
      if (answer.redirected) { location.replace('/login'); return; }
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      document.getElementById('main').replaceWith(document.adoptNode(page.getElementById('main')));
      document.title = page.title;
    } catch (error) { say('unreachable'); }
    timer = null;
    if (again) { again = false; soon(); }
  };
  const soon = () => { if (timer) { again = true; } else { timer = setTimeout(refresh, 250); } };
  const look = document.getElementById('look');
  if (look) {
    look.onclick = async () => {
      const answer = await fetch('/api/v1/look', { method: 'POST', headers: { 'X-Abide-Csrf': look.dataset.csrf } });
      say(answer.ok ? 'reconciling' : 'refused (' + answer.status + ')');
    };
  }
  const last = document.getElementById('main').dataset.last;
  const source = new EventSource('/api/v1/events?after=' + last);
  source.onopen = () => say('live');
  source.onmessage = soon;
  source.addEventListener('missed', soon);
  source.onerror = () => say('connecting');
  setInterval(soon, 30000);
})();
